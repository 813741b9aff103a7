"""What an engine lends and borrows: `Lending`, the loop of DistAttention's rManager without a master.

Every member publishes its row, keeps a ledger of all rows, and decides by itself (kvpool.policy.lending). A creditor
that is asked decides, first come first served.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

import numpy as np

from kvpool.cluster import Cluster, Registration
from kvpool.control.lending.creditors import Creditors
from kvpool.control.lending.members import LendingMembers, row_json, this_host
from kvpool.control.lending.moving import Deadline, Part, bring, give_up, send
from kvpool.control.lending.pools import Addresses, LendingPool, LentSequence
from kvpool.control.lending.prefilling import Prefill
from kvpool.control.lending.sequences import Borrowing
from kvpool.errors import (
    ArgumentError,
    ClosedError,
    DeadlineExceeded,
    Error,
    OutOfBlocks,
    StateError,
)
from kvpool.policy import lending as policy
from kvpool.types import DRAM, HBM, Medium
from kvpool.types.addresses import AddressLike

__all__ = ["Lending"]

_log = logging.getLogger("kvpool.lending")

_LEAF_TOKENS: Final = 1024  # of the tree in which partial results are merged
_FORGIVE_HEARTBEATS: Final = 10


class Lending:
    """Lends blocks of a pool to other members of its cluster, and borrows theirs when its memory runs short.

    Publishes what the pool has free, lends and owes with the heartbeat, when it moved by 5 % or more. A thread does
    that until it is closed, or the pool is; what others publish is read when a call needs it.

    Calls may come from any thread; those that move blocks wait for each other. A context manager. It keeps the pool and
    the sequences that have borrowed blocks; it ends without being closed if nothing refers to it any more.

    Args:
        pool: Attached to the cluster.
        cluster: Of this pool.
        medium: Where blocks are short: blocks of it go, and they come home to it. Creditors lend this medium.
        lend_max: So many blocks others are to have at a time: sets `Pool.peers.lend_max`, which the pool keeps. An
            engine may change that at any time; what is lent above it is wanted back. None: as the pool has it.
        reserve: So many free blocks are not offered, and not used up by what comes home.
        tail: So many last blocks of each sequence stay here; None: a leaf of 1,024 tokens.

    Raises:
        StateError: The pool is no member of the cluster.
        ArgumentError: A value out of range.
        ClosedError: The cluster is closed.
    """

    def __init__(
        self,
        pool: LendingPool,
        cluster: Cluster,
        *,
        medium: Medium = DRAM,
        lend_max: int | None = None,
        reserve: int = 0,
        tail: int | None = None,
    ) -> None:
        registration = cluster.registration
        if registration is None:
            raise StateError("lending: attach the pool to the cluster first")
        if medium not in (HBM, DRAM):
            raise ArgumentError(f"lending: medium is {medium!r}; it must be kvpool.HBM or kvpool.DRAM")
        self._pool = pool
        self._registration: Registration = registration
        self._medium = Medium(medium)
        self._capacity: int = self._stats().capacity
        if lend_max is not None:
            _count("lend_max", lend_max, 0)
        self._reserve = _count("reserve", reserve, 0)
        self._leaf = _leaf_blocks(pool.kv_layout.block_tokens)
        self._tail = self._leaf if tail is None else _count("tail", tail, 1)
        self._moving = threading.Lock()  # one call at a time moves blocks; taken before _lock
        self._lock = threading.Lock()  # of the members and the published row; held briefly
        self._borrowing = Borrowing(registration.instance, self._medium, pool.kv_layout.block_tokens)
        self._published: policy.Row | None = None
        self._version = time.monotonic_ns()  # goes on where an earlier one of this process ended
        self._members = LendingMembers(cluster, _FORGIVE_HEARTBEATS * cluster.heartbeat_s)
        self._creditors = Creditors(pool, registration, self._medium, self._members, self._lock)
        if lend_max is not None:
            pool.peers.lend_max = lend_max
        self._stop = threading.Event()
        self._end = weakref.finalize(self, _end, self._stop, self._members.close)
        self.publish()
        args = self._stop, cluster.heartbeat_s, weakref.WeakMethod(self.publish)
        threading.Thread(target=_publish_until, args=args, name="kvpool-lending", daemon=True).start()

    def offload(self, sequence: LentSequence, blocks: int, *, timeout: float | None = None) -> int:
        """Moves the oldest blocks of a sequence to creditors, so that blocks become free here.

        Asks three members that have room, near ones first more often, then three others, until one lends all; if none
        does, several for a part each. Whole leaves of 1,024 tokens go where that is possible. The tail stays.

        Args:
            sequence: Of this pool.
            blocks: How many blocks are to become free.
            timeout: Seconds for all of it; None: the pool's setting ``timeout_s``.

        Returns:
            How many blocks have become free: `blocks`, or up to a leaf more.

        Raises:
            OutOfBlocks: The other members lend too few.
            ArgumentError: The sequence has too few blocks here that may go, or `blocks` is below 1.
            PeerLost, Busy: A creditor lent blocks, and did not take their content.
            DeadlineExceeded: It was not done in time.
            StateError: The engine replaced these blocks meanwhile, or the sequence is closed.
            NotOwner: The old blocks are not the engine's to free, such as cached ones. They have gone all the same.
            ClosedError: This is closed, or the pool.
            In all other cases the sequence is as before, and nothing more is borrowed than before.
        """
        _count("blocks", blocks, 1)
        deadline = self._deadline(timeout)
        with self._turn(deadline):
            self._check_open()
            set_backs = sequence._set_backs
            held = self._borrowing.held(sequence)
            able = policy.plan_offload([held], blocks, {0: self._capacity}, self._leaf, self._tail)
            if able.missing:
                has = blocks - able.missing
                raise ArgumentError(
                    f"offload: {blocks} blocks; {has} lie here and may go", requested=blocks, blocks=has
                )
            lent = self._creditors.borrow(sum(move.blocks for move in able.moves), deadline)
            try:
                room = {creditor: len(addrs) for creditor, addrs in lent.items()}
                plan = policy.plan_offload([held], blocks, room, self._leaf, self._tail)
                if plan.missing:
                    raise OutOfBlocks(
                        "offload: what the members lend is in too small parts",
                        requested=blocks,
                        free=blocks - plan.missing,
                    )
                parts = self._parts(sequence, plan, lent)
                send(self._pool, sequence, parts, set_backs, deadline)
            except BaseException:
                for addrs in lent.values():
                    give_up(self._pool, addrs)
                raise
            gone = dict.fromkeys(lent, 0)
            for move in plan.moves:
                gone[move.creditor] += move.blocks
            for creditor, addrs in lent.items():
                if gone[creditor] < len(addrs):  # a plan for the real rooms may need fewer
                    give_up(self._pool, addrs[gone[creditor] :])
            self._borrowing.note(sequence)
            self._pool.free(np.concatenate([part.old for part in parts]))
        self._tell()
        return sum(gone.values())

    def prefill(self, tokens: int, *, chunk_tokens: int | None = None, timeout: float | None = None) -> Prefill:
        """Makes room for a prompt, borrowing what does not fit here, and streams its later blocks to creditors.

        Early blocks and the tail stay here; what lies between goes to creditors in whole leaves. The engine computes
        chunk after chunk, and each layer of a chunk travels while the next one is computed:

            with lending.prefill(len(prompt)) as prefill:
                for chunk in prefill:
                    for layer in range(layers):
                        compute(layer, prompt[chunk.first : chunk.end], into=chunk.addrs, over=prefill.sequence)
                        chunk.send_layer(layer)
            seq = prefill.sequence

        Args:
            tokens: Of the prompt.
            chunk_tokens: So many are computed at a time; None: a leaf of 1,024. Rounded up to blocks. Two chunks are
                kept here beside what stays. With chunks of whole leaves attention has the same bits as over a prompt
                that lies here; with others it is rounded differently while a leaf is on its way.
            timeout: Seconds to make room, and to send a chunk; None: the pool's setting ``timeout_s``.

        Returns:
            The chunks, and the sequence. Leave it with an exception, and all blocks are freed here and there.

        Raises:
            OutOfBlocks: What is free here, cached prompts included, and what members lend is too little.
            ArgumentError: A number is below 1.
            DeadlineExceeded: There was no room in time.
            ClosedError: This is closed, or the pool.
            Nothing is borrowed or allocated then.
        """
        size = self._pool.kv_layout.block_tokens
        blocks = -(-_count("tokens", tokens, 1) // size)
        chunk = self._leaf if chunk_tokens is None else -(-_count("chunk_tokens", chunk_tokens, 1) // size)
        deadline = self._deadline(timeout)
        with self._turn(deadline):
            self._check_open()
            stats = self._stats()
            room = stats.free + stats.evictable

            def plan(lent: Mapping[int, int]) -> policy.PrefillPlan:
                made = policy.plan_prefill(blocks, room, lent, chunk, self._leaf, self._tail)
                if made.missing:
                    raise OutOfBlocks(
                        f"prefill: {made.missing} of {blocks} blocks fit neither here nor at the members",
                        requested=blocks,
                        free=blocks - made.missing,
                    )
                return made

            lent = self._creditors.borrow(blocks - plan({0: blocks}).home, deadline)
            try:
                made = plan({creditor: len(addrs) for creditor, addrs in lent.items()})
                with self._lock:
                    names = {creditor: self._members.name(creditor) for creditor in lent}
                left_s = deadline.left("make room")
                home = self._pool.alloc(made.home + made.staging, int(self._medium), True, timeout=left_s)
            except BaseException:
                for addrs in lent.values():
                    give_up(self._pool, addrs)
                raise
        seconds = self._pool.settings.timeout_s if timeout is None else timeout
        return Prefill(self._pool, tokens, made, chunk, home, lent, names, seconds, self.watch)

    def payback(self, *, timeout: float | None = None) -> int:
        """Brings blocks home as far as there is room beyond the reserve.

        First what creditors want back, then the oldest loans. A part that does not come, because its creditor is busy
        or gone, stays as it is, and others come. What was lost with a creditor is what attention over the sequence
        reports.

        Args:
            timeout: Seconds for all of it; None: the pool's setting ``timeout_s``. When they are over, what is home
                stays.

        Returns:
            How many blocks have come home.

        Raises:
            DeadlineExceeded: Another call that moves blocks took too long.
            ClosedError: This is closed, or the pool.
        """

        def plan() -> Iterable[policy.Payback]:
            with self._lock:
                self._members.apply()
                wanted = self._members.wanted()
            room = max(0, self._stats().free - self._reserve)
            return policy.plan_payback(self._borrowing.loans(), room, wanted, self._leaf)

        return self._bring_home(plan, timeout)

    def give_back(self, addrs: AddressLike, *, timeout: float | None = None) -> int:
        """Brings home blocks that a creditor recalls, as far as there is any room, the reserve included.

        For `Peers.on_change`: call it with the `addrs` of a "recalled" event. What has not come home by the event's
        deadline is lost, and attention over the sequence reports it; make room first if it must not be.

        Args:
            addrs: The recalled blocks. Those of no sequence of this are left alone.
            timeout: Seconds for all of it; None: the pool's setting ``timeout_s``.

        Returns:
            How many blocks have come home.

        Raises:
            DeadlineExceeded: Another call that moves blocks took too long.
            ClosedError: This is closed, or the pool.
        """

        def plan() -> Iterable[policy.Payback]:
            return policy.plan_payback(self._borrowing.loans(among=addrs), self._stats().free, leaf=self._leaf)

        return self._bring_home(plan, timeout)

    def watch(self, sequence: LentSequence) -> None:
        """Lets `payback` bring home blocks of a sequence that the engine offloaded by itself. Any thread."""
        with self._moving:
            self._check_open()
            self._borrowing.note(sequence)

    def publish(self) -> bool:
        """Publishes this member's row if it has moved enough; the thread calls it once a heartbeat.

        Returns:
            Whether it was published.

        Raises:
            ClosedError: This is closed, or the pool.
        """
        with self._lock:
            self._check_open()
            self._members.apply()
            row = self._row()
            if not policy.worth_publishing(self._published, row):
                return False
            self._registration.publish(lending=row_json(row))
            self._published = row
            self._version = row.version
            self._members.ledger.take(row)
            return True

    @property
    def row(self) -> policy.Row | None:
        """The row that was published last."""
        return self._published

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._stop.is_set()

    def close(self) -> None:
        """Lends no more, and publishes nothing more. Loans stay as they are. Idempotent."""
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
            with contextlib.suppress(Error):  # the member has left
                self._registration.publish(lending={})
        self._end()

    def __enter__(self) -> Lending:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    # ---- moving

    @contextlib.contextmanager
    def _turn(self, deadline: Deadline) -> Iterator[None]:
        """One call at a time moves blocks."""
        if not self._moving.acquire(timeout=deadline.left("wait for other calls")):
            raise DeadlineExceeded("lending: another call that moves blocks took too long")
        try:
            yield
        finally:
            self._moving.release()

    def _parts(self, sequence: LentSequence, plan: policy.OffloadPlan, lent: dict[int, Addresses]) -> list[Part]:
        addrs, used = sequence.addrs, dict.fromkeys(lent, 0)
        parts = []
        for move in plan.moves:
            begin = used[move.creditor]
            used[move.creditor] = end = begin + move.blocks
            with self._lock:
                name = self._members.name(move.creditor)
            parts.append(
                Part(move.first, addrs[move.first : move.first + move.blocks], lent[move.creditor][begin:end], name)
            )
        return parts

    def _bring_home(self, plan: Callable[[], Iterable[policy.Payback]], timeout: float | None) -> int:
        """What the plan says, which is made when it is this call's turn; how many blocks have come home."""
        deadline = self._deadline(timeout)
        with self._turn(deadline):
            self._check_open()
            home = self._bring_all(plan(), deadline)
        if home:
            self._tell()
        return home

    def _bring_all(self, plan: Iterable[policy.Payback], deadline: Deadline) -> int:
        """How many blocks have come home; what a creditor does not give up now stays there."""
        home = 0
        for part in plan:
            try:
                home += self._bring(part, deadline)
            except (OutOfBlocks, DeadlineExceeded):  # others took the room, or there is no time for more
                break
            except ClosedError:
                raise
            except Error as error:
                _log.info("%d blocks stay with member %d: %s", part.blocks, part.creditor, error)
        return home

    def _bring(self, plan: policy.Payback, deadline: Deadline) -> int:
        sequence = self._borrowing.sequence(plan.sequence)
        set_backs = sequence._set_backs
        old = sequence.addrs[plan.first : plan.first + plan.blocks]
        home = self._pool.alloc(plan.blocks, int(self._medium), False, timeout=deadline.left("bring blocks home"))
        try:
            bring(self._pool, sequence, Part(plan.first, old, home, ""), set_backs, deadline)
        except BaseException:
            give_up(self._pool, home)
            raise
        give_up(self._pool, old)
        return plan.blocks

    # ---- this member

    def _stats(self) -> Any:
        stats = self._pool.stats()
        return stats.hbm if self._medium == HBM else stats.dram

    def _row(self) -> policy.Row:
        stats, record = self._stats(), self._registration.record
        limit = self._pool.peers.lend_max
        lend_max = stats.capacity if limit is None else min(limit, stats.capacity)
        debts = {
            peer.instance: peer.borrowed_blocks for peer in self._pool.peers if peer.instance and peer.borrowed_blocks
        }
        return policy.Row(
            record.instance,
            record.term,
            self._version + 1,
            this_host(),
            stats.capacity,
            {self._medium: max(0, stats.free - self._reserve)},
            lend_max,
            stats.lent,
            debts,
            min(stats.lent, max(0, stats.lent - lend_max, self._reserve - stats.free)),
        )

    def _tell(self) -> None:
        """Publishes after blocks have moved. They have, even if this fails."""
        try:
            self.publish()
        except Error as error:
            _log.info("the row was not published: %s", error)

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is None:
            return Deadline(self._pool.settings.timeout_s)
        if not timeout >= 0:
            raise ArgumentError(f"timeout is {timeout}; it must be 0 or more")
        return Deadline(timeout)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("lending was closed")
        if self._pool.closed:
            raise ClosedError("the pool is closed")


def _leaf_blocks(block_tokens: int) -> int:
    """Blocks of a leaf; the power of two below, if no whole number of blocks makes one."""
    return 1 << max(0, (_LEAF_TOKENS // block_tokens).bit_length() - 1)


def _count(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"lending: {name} is {value!r}; it must be a whole number from {least}")
    return value


def _publish_until(stop: threading.Event, heartbeat_s: float, publish: weakref.WeakMethod[Callable[[], bool]]) -> None:
    while not stop.wait(heartbeat_s):
        strong = publish()
        if strong is None:
            return
        try:
            strong()
        except ClosedError:
            return
        except StateError as error:  # another incarnation has the name
            _log.info("the row was not published: %s", error)
        except Exception:
            _log.exception("publishing what this member lends has failed; it is tried again")
        del strong


def _end(stop: threading.Event, close: Callable[[], object]) -> None:
    """Also runs when nothing refers to a `Lending` any more."""
    stop.set()
    close()
