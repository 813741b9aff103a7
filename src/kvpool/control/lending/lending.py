"""What an engine lends and borrows: `Lending`, the loop of DistAttention's rManager without a master.

Every member publishes its row, keeps a ledger of all rows, and decides by itself (kvpool.policy.lending). A creditor
that is asked decides, first come first served.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final

from kvpool.cluster import Cluster, Registration
from kvpool.control.lending.creditors import Creditors
from kvpool.control.lending.home import Homecoming
from kvpool.control.lending.members import LendingMembers
from kvpool.control.lending.moving import Deadline
from kvpool.control.lending.outgoing import Outgoing
from kvpool.control.lending.pools import LendingPool, LentSequence
from kvpool.control.lending.prefilling import Prefill
from kvpool.control.lending.publisher import Publisher, publish_until
from kvpool.control.lending.sequences import Borrowing
from kvpool.control.lending.settling import Settling
from kvpool.errors import ArgumentError, DeadlineExceeded, StateError, Unsupported
from kvpool.policy import lending as policy
from kvpool.types import DRAM, HBM, Medium
from kvpool.types.addresses import AddressLike

__all__ = ["Lending"]

_LEAF_TOKENS: Final = 1024  # of the tree in which partial results are merged
_FORGIVE_HEARTBEATS: Final = 10
_FREEZE_HEARTBEATS: Final = 30  # an answer takes one or two, and so does a round
_PAUSE_HEARTBEATS: Final = 10  # between two looks for cycles
_ROUND_LEAVES: Final = 8


class Lending:
    """Lends blocks of a pool to other members of its cluster, and borrows theirs when its memory runs short.

    Publishes what the pool has free, lends and owes with the heartbeat, when it moved by 5 % or more. A thread does
    that until it is closed, or the pool is; what others publish is read when a call needs it.

    Calls may come from any thread; those that move blocks wait for each other. A context manager. It keeps the pool and
    the sequences that have borrowed blocks; it ends without being closed if nothing refers to it any more.

    A member whose engine does not call `settle`, or has not for thirty heartbeats, takes no part in settlements: others
    leave its debts out.

    Args:
        pool: Attached to the cluster.
        cluster: Of this pool.
        medium: Where blocks are short: blocks of it go, and they come home to it. Creditors lend this medium.
        lend_max: So many blocks others are to have at a time: sets `Pool.peers.lend_max`, which the pool keeps. An
            engine may change that at any time; what is lent above it is wanted back. None: as the pool has it.
        reserve: So many free blocks are not offered, and not used up by what comes home.
        tail: So many last blocks of each sequence stay here; None: a leaf of 1,024 tokens.
        settle_min: Debts in a circle are settled if each of them is at least so many blocks; None: a leaf.
        settle_blocks: So many blocks each member of the circle brings home in a round; None: eight leaves. They count
            for settlements that this member coordinates.

    Raises:
        StateError: The pool is no member of the cluster.
        ArgumentError: A value out of range.
        Unsupported: The pool is of a space, with ``pieces="layer"``: nobody attends to blocks that lie in pieces.
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
        settle_min: int | None = None,
        settle_blocks: int | None = None,
    ) -> None:
        registration = cluster.registration
        if registration is None:
            raise StateError("lending: attach the pool to the cluster first")
        if pool._pieces > 1:
            raise Unsupported("lending: blocks of this pool may lie in several pieces, to which nobody can attend")
        if medium not in (HBM, DRAM):
            raise ArgumentError(f"lending: medium is {medium!r}; it must be kvpool.HBM or kvpool.DRAM")
        self._pool = pool
        medium = Medium(medium)
        self._leaf = leaf = _leaf_blocks(pool.kv_layout.block_tokens)
        tail = leaf if tail is None else _count("tail", tail, 1)
        self._moving = threading.Lock()  # one call at a time moves blocks; taken before _lock
        self._lock = threading.Lock()  # of the members, the settler and the published row; held briefly
        heartbeat_s = cluster.heartbeat_s
        settler = _settler(registration, heartbeat_s, leaf, settle_min, settle_blocks)
        if lend_max is not None:
            _count("lend_max", lend_max, 0)
        reserve = _count("reserve", reserve, 0)
        self._members = LendingMembers(cluster, settler, _FORGIVE_HEARTBEATS * heartbeat_s)
        if lend_max is not None:
            pool.peers.lend_max = lend_max
        self._stop = threading.Event()
        self._own = Publisher(pool, registration, medium, reserve, self._members, settler, self._lock, self._stop)
        self._borrowing = Borrowing(registration.instance, medium, pool.kv_layout.block_tokens)
        self._home = Homecoming(pool, medium, self._borrowing)
        self._outgoing = Outgoing(
            pool,
            medium,
            leaf,
            tail,
            self._borrowing,
            Creditors(pool, registration, medium, self._members, self._lock),
            self._members,
            self._lock,
        )
        self._settling = Settling(settler, self._members, self._own, self._borrowing, self._home, leaf, self._lock)
        self._end = weakref.finalize(self, _end, self._stop, self._members.close)
        self.publish()
        args = self._stop, cluster.heartbeat_s, weakref.WeakMethod(self.publish)
        threading.Thread(target=publish_until, args=args, name="kvpool-lending", daemon=True).start()

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
            self._own.check_open()
            gone = self._outgoing.send(sequence, blocks, deadline)
        self._own.tell()
        return gone

    def prefill(
        self,
        tokens: int,
        *,
        chunk_tokens: int | None = None,
        chunk_timeout: float | None = None,
        timeout: float | None = None,
    ) -> Prefill:
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
            chunk_timeout: Seconds to compute a chunk and send it; None: ten times the pool's setting ``timeout_s``.
            timeout: Seconds to make room; None: the pool's setting ``timeout_s``.

        Returns:
            The chunks, and the sequence. Leave it with an exception, and all blocks are freed here and there. What a
            creditor recalls before the last chunk has been sent does not come home by `give_back`: the prefill ends.

        Raises:
            OutOfBlocks: What is free here, cached prompts included, and what members lend is too little.
            ArgumentError: A number is below 1, or `chunk_timeout` is not above 0.
            DeadlineExceeded: There was no room in time.
            ClosedError: This is closed, or the pool.
            Nothing is borrowed or allocated then.
        """
        size = self._pool.kv_layout.block_tokens
        blocks = -(-_count("tokens", tokens, 1) // size)
        chunk = self._leaf if chunk_tokens is None else -(-_count("chunk_tokens", chunk_tokens, 1) // size)
        seconds = 10 * self._pool.settings.timeout_s if chunk_timeout is None else chunk_timeout
        if not seconds > 0:
            raise ArgumentError(f"chunk_timeout is {chunk_timeout}; it must be above 0")
        deadline = self._deadline(timeout)
        with self._turn(deadline):
            self._own.check_open()
            room = self._outgoing.room(blocks, chunk, deadline)
        prefill = Prefill(self._pool, tokens, room, min(chunk, blocks), seconds, self._borrowing.note_soon)
        self._own.tell()
        return prefill

    def payback(self, *, timeout: float | None = None) -> int:
        """Brings blocks home as far as there is room beyond the reserve.

        First what creditors want back, then the oldest loans. A part that does not come, because its creditor is busy
        or gone, stays as it is, and others come. What was lost with a creditor is what attention over the sequence
        reports. Blocks that a settlement has frozen wait for it, and so does the room that its present round needs.

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
            loans = self._settling.payable(self._borrowing.loans())
            return policy.plan_payback(loans, self._settling.room(), wanted, self._leaf)

        return self._bring_home(plan, timeout)

    def give_back(self, addrs: AddressLike, *, timeout: float | None = None) -> int:
        """Brings home blocks that a creditor recalls, as far as there is any room, the reserve included.

        For `Peers.on_change`: call it with the `addrs` of a "recalled" event. It waits for other calls that move
        blocks; for the leaf that `settle` brings home just now at most three heartbeats, if its creditor is stopped.
        What has not come home by the event's deadline is lost, and attention over the sequence reports it; make room
        first if it must not be.

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
            return policy.plan_payback(self._borrowing.loans(among=addrs), self._own.stats().free, leaf=self._leaf)

        with self._settling.recall():
            return self._bring_home(plan, timeout)

    def settle(self, *, timeout: float | None = None) -> int:
        """Takes part in settling debts that go round in a circle, and brings home what is due and has room now.

        Call it again and again, as often as `payback`: each call does what can be done by what the other members have
        published, and waits for none of them. If a owes b, b owes c and c owes a, each brings home as many blocks as
        the others; one free block on the circle suffices for that. The member with the smallest id coordinates. A
        settlement ends by itself, within thirty heartbeats, whatever becomes of its members, and may end at any moment:
        what has come home stays home.

        Args:
            timeout: Seconds for all of it; None: the pool's setting ``timeout_s``. When they are over, what is home
                stays.

        Returns:
            How many blocks have come home to this pool.

        Raises:
            DeadlineExceeded: Another call that moves blocks took too long.
            ClosedError: This is closed, or the pool.
        """
        deadline = self._deadline(timeout)
        with self._turn(deadline):
            self._own.check_open()
            home = self._settling.turn(deadline)
        if home or self._settling.has_news:
            self._own.tell()
        return home

    def watch(self, sequence: LentSequence) -> None:
        """Lets blocks of a sequence that the engine offloaded by itself come home like others. Any thread."""
        with self._moving:
            self._own.check_open()
            self._borrowing.note(sequence)

    def publish(self) -> bool:
        """Publishes this member's row if it has moved enough; the thread calls it once a heartbeat.

        Returns:
            Whether it was published.

        Raises:
            ClosedError: This is closed, or the pool.
        """
        return self._own.publish()

    @property
    def row(self) -> policy.Row | None:
        """The row that was published last."""
        return self._own.row

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._stop.is_set()

    def close(self) -> None:
        """Lends no more, and publishes nothing more. Loans stay as they are. Idempotent."""
        if self._own.close():
            self._end()

    def __enter__(self) -> Lending:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    @contextlib.contextmanager
    def _turn(self, deadline: Deadline) -> Iterator[None]:
        """One call at a time moves blocks."""
        if not self._moving.acquire(timeout=deadline.left("wait for other calls")):
            raise DeadlineExceeded("lending: another call that moves blocks took too long")
        try:
            yield
        finally:
            self._moving.release()

    def _bring_home(self, plan: Callable[[], Iterable[policy.Payback]], timeout: float | None) -> int:
        """What the plan says, which is made when it is this call's turn; how many blocks have come home."""
        deadline = self._deadline(timeout)
        with self._turn(deadline):
            self._own.check_open()
            home = self._home.bring(plan(), deadline)
        if home:
            self._own.tell()
        return home

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is None:
            return Deadline(self._pool.settings.timeout_s)
        if not timeout >= 0:
            raise ArgumentError(f"timeout is {timeout}; it must be 0 or more")
        return Deadline(timeout)


def _settler(
    registration: Registration, heartbeat_s: float, leaf: int, settle_min: int | None, settle_blocks: int | None
) -> policy.Settler:
    rules = policy.SettlementRules(
        least=leaf if settle_min is None else _count("settle_min", settle_min, 1),
        chunk=_ROUND_LEAVES * leaf if settle_blocks is None else _count("settle_blocks", settle_blocks, 1),
        leaf=leaf,
        freeze_s=min(_FREEZE_HEARTBEATS * heartbeat_s, policy.FREEZE_S_MAX),
        pause_s=_PAUSE_HEARTBEATS * heartbeat_s,
    )
    return policy.Settler(
        registration.instance,
        policy.Ledger(),
        rules,
        number=time.monotonic_ns(),  # goes on where an earlier one of this process ended
        seed=registration.record.incarnation,
    )


def _leaf_blocks(block_tokens: int) -> int:
    """Blocks of a leaf; the power of two below, if no whole number of blocks makes one."""
    return 1 << max(0, (_LEAF_TOKENS // block_tokens).bit_length() - 1)


def _count(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"lending: {name} is {value!r}; it must be a whole number from {least}")
    return value


def _end(stop: threading.Event, close: Callable[[], object]) -> None:
    """Also runs when nothing refers to a `Lending` any more."""
    stop.set()
    close()
