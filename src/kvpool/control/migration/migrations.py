"""Live migration of the requests of an engine: `Migrations`, the one call for engine authors."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final, get_args

from kvpool.cluster import Cluster
from kvpool.control.amounts import above_zero, count_from
from kvpool.control.migration.background import Threads
from kvpool.control.migration.engine import MigratingEngine
from kvpool.control.migration.evidence import Evidence, Proof
from kvpool.control.migration.handle import Migrated, Migration
from kvpool.control.migration.incoming import Incoming
from kvpool.control.migration.leaving import Leaving
from kvpool.control.migration.mailbox import NAMESPACE, Mailbox
from kvpool.control.migration.talking import Dialogue, Timing
from kvpool.control.migration.totals import MigrationTotals, Tally
from kvpool.errors import ArgumentError, ClosedError, PeerLost, StateError, Unsupported
from kvpool.policy import migration as policy
from kvpool.pool import Pool
from kvpool.transfer import Received, ReceivedCallback
from kvpool.types import DRAM, HBM, Medium

__all__ = ["Migrations"]

_log = logging.getLogger("kvpool.migration")

_POOLS: Final[weakref.WeakSet[Pool]] = weakref.WeakSet()  # that have, or had, one of these
_GROWTH_BLOCKS: Final = 2  # room for a request whose engine does not say how much it needs
_ARRIVALS_MAX: Final = 8


class Migrations:
    """Moves requests of an engine to other engines while they decode, and takes in those that come.

    The pool must have peers: listen, connect or attach first. Each engine that requests come from or go to has one of
    these, and a pool has one in its life: another would not know what the first has promised. It takes the pool's
    inbox, unless `take_inbox` is False: then give every item of it to `take`. It keeps one block of the pool. A context
    manager; thread-safe.

    Args:
        pool: Of the engine.
        engine: Has the requests.
        cluster: Of the pool, if it is in one: its leases prove which members are gone.
        medium: Where requests that come get their blocks.
        costs: What was measured of links to here and of prefills here: by it, requests that come with "auto" go the way
            that takes less. None: they go by KV.
        bytes_per_s: What rounds of all requests that come may take of the links; None: no bound. Background transfers
            wait for others in any case, but share the wire with those of other pools.
        rules: When rounds end.
        timing: Of the protocol.
        arrivals_max: So many requests may be on their way to here; others are refused.
        gone: Asked whether an incarnation of a peer has ended or is fenced, with the name and the number, if nothing on
            this host proves its end. "ended" also counts for one that the cluster has fenced: it will never wake.
        on_received: Gets the items of the inbox that are no messages of migrations.
        take_inbox: False: the engine reads the inbox, and gives items to `take`.

    Raises:
        StateError: The pool has no peers yet, or had a `Migrations` before, or something else takes its inbox; or its
            HBM is a rank's memory, whose scheduler has the requests.
        OutOfBlocks: It has no block left.
        ArgumentError: A value out of range.
    """

    def __init__(
        self,
        pool: Pool,
        engine: MigratingEngine,
        *,
        cluster: Cluster | None = None,
        medium: Medium = HBM,
        costs: policy.WayCosts | None = None,
        bytes_per_s: float | None = None,
        rules: policy.StopRules | None = None,
        timing: Timing | None = None,
        arrivals_max: int = _ARRIVALS_MAX,
        gone: Callable[[str, int], Proof | None] | None = None,
        on_received: Callable[[Received], object] | None = None,
        take_inbox: bool = True,
    ) -> None:
        if pool.peers.name is None:
            raise StateError("migrations: the pool has no peers yet: listen, connect or attach first")
        if pool in _POOLS:
            raise StateError("migrations: the pool has one already, or had one: a pool has one in its life")
        if medium not in (HBM, DRAM):
            raise ArgumentError(f"medium is {medium!r}; it must be HBM or DRAM")
        arrivals_max = count_from(arrivals_max, "arrivals_max", 0)
        if bytes_per_s is not None:
            bytes_per_s = above_zero(bytes_per_s, "bytes_per_s")
        _check_whole(pool)
        self._pool = pool
        self._engine = engine
        self._rules = rules or policy.StopRules()
        self._timing = timing or Timing()
        self._on_received = on_received
        self._evidence = Evidence(pool, cluster, gone)
        self._tally = Tally()
        self._threads = Threads()
        self._lock = threading.Lock()  # of what follows; held briefly
        self._departures = policy.Departures(pool._incarnation())
        self._leaving: dict[policy.MigrationId, Leaving] = {}
        self._closed = False
        self._mailbox = Mailbox(pool)
        try:
            self._incoming = Incoming(
                pool,
                engine,
                self._mailbox,
                self._evidence,
                self._timing,
                self._threads,
                self._tally,
                Medium(medium),
                costs,
                bytes_per_s,
                arrivals_max,
            )
            self._callback: ReceivedCallback | None = pool.inbox.on_received(self._receive) if take_inbox else None
        except BaseException:
            self._mailbox.close()
            raise
        _POOLS.add(pool)

    def migrate(self, request: str, to: str, *, by: policy.Way = "auto", timeout: float | None = None) -> Migration:
        """Begins to move a request to the engine of a peer. It goes on decoding here until the last step of the move.

        Args:
            request: Its name, by which the engine knows it; the same at both ends.
            to: The peer's name.
            by: "kv": its blocks are copied, but for the prefix that is cached there. "tokens": it is prefilled there,
                but for that prefix. "auto": the destination chooses what takes less.
            timeout: Seconds until it has to be there; None: the pool's setting ``timeout_s``.

        Returns:
            A handle: wait, await, cancel, state. If it fails the request goes on here, unless `state` says otherwise.

        Raises:
            StateError: The engine does not have the request, or it is on its way already; or a rank has this pool's
                memory.
            Unsupported: Its blocks lie in several pools: ranks without a scheduler.
            Busy: It has just come, and its source does not know that yet.
            PeerLost: There is no such peer. Or a rank of this instance is lost, and all of its blocks with it.
            ArgumentError: A wrong way or timeout, or the name or its namespace has more than 1,024 characters.
            ClosedError: This is closed, or the pool.
        """
        if by not in get_args(policy.Way):
            raise ArgumentError(f"by is {by!r}; it must be one of {', '.join(get_args(policy.Way))}")
        seconds = self._pool.settings.timeout_s if timeout is None else above_zero(timeout, "timeout")
        if self._closed:
            raise ClosedError("the migrations of this pool were closed")
        _check_whole(self._pool)
        self.check()
        deadline = time.monotonic() + seconds
        destination = self._find(to, seconds)
        found = self._engine.progress(request)
        if found is None:
            raise StateError(f"the engine does not have request {request!r}")
        if found.pools != 1:
            raise Unsupported(
                f"the blocks of request {request!r} lie in {found.pools} pools, of which each could move without the "
                "others: make them ranks of one instance (Pool.ranks), and migrate at its scheduler"
            )
        policy.check_names(request, found.namespace)
        size = self._pool.kv_layout.block_tokens
        room = found.room or len(found.tokens) + _GROWTH_BLOCKS * size
        handle = Migration(request, to)
        with self._lock:
            self._check_free(request)
            source = policy.Source(
                self._departures.next_id(destination),
                request,
                found.namespace,
                by,
                found.term,
                room,
                policy.Progress(found.tokens, found.whole, found.blocks),
                size,
                self._rules,
            )
            dialogue: Dialogue[policy.DestinationSays] = Dialogue(self._mailbox, to, self._timing, source.says)
            handle._waker = dialogue.wake
            leaving = Leaving(
                source,
                handle,
                self._engine,
                dialogue,
                self._evidence,
                self._timing,
                deadline,
                self._pool.kv_layout.block_bytes,
                self._left,
            )
            self._departures.begin(source)
            self._leaving[source.id] = leaving
            try:
                self._threads.start(leaving.run)
            except BaseException:  # this process can have no more threads
                del self._leaving[source.id]
                source.cancel("no thread carries it out")
                self._departures.end(source)
                raise
        return handle

    def take(self, item: Received) -> bool:
        """Reads an item of the inbox, if it is a message of a migration, and closes it. Whether it was one. Quick."""
        if item.namespace != NAMESPACE:
            return False
        peer, message = item.peer, item.private
        item.close()
        try:
            said = policy.decode(message)
        except ArgumentError as error:
            _log.warning("%s sent what is no message of a migration: %s", peer, error, extra={"peer": peer})
            return True
        sender = said.id.source if isinstance(said, policy.SourceSays) else said.id.destination
        if self._evidence.incarnation(peer) != sender:
            return True  # of an earlier incarnation, or of none
        if isinstance(said, policy.SourceSays):
            self._incoming.hear(peer, said)
        else:
            self._hear_destination(peer, said)
        return True

    def under_way(self) -> tuple[Migration, ...]:
        """The handles of the requests that leave."""
        with self._lock:
            return tuple(each.handle for each in self._leaving.values())

    def arriving(self) -> tuple[str, ...]:
        """The names of the requests that come, and of those that came and whose source does not know it yet.

        Not of those that have ended here and whose source is fenced: they keep no instance from its end.
        """
        return self._incoming.names()

    def check(self) -> None:
        """Raises PeerLost if a rank of this instance is lost, and all of its blocks with it: nothing moves any more."""
        if (lost := self._evidence.lost()) is not None:
            raise lost

    def totals(self) -> MigrationTotals:
        """What became of migrations so far."""
        return self._tally.totals()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def close(self, timeout: float = 5.0) -> None:
        """Takes in no more requests, and cancels those that leave. Idempotent.

        Those that were handed over are asked back, and waited for, for `timeout` seconds. Where it is not known then
        who has one, its `state` goes on saying "handed over", and the engine keeps its blocks. The handles of all that
        have not arrived end with Cancelled.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            leaving = list(self._leaving.values())
        for each in leaving:
            each.handle.cancel()
        self._incoming.give_up()
        self._threads.join(timeout)
        for each in leaving:
            each.tear_off(ClosedError("the migrations of this pool were closed"))
        self._incoming.tear_off()
        self._threads.join(self._timing.silence_s)
        if self._callback is not None:
            self._callback.close()
        self._mailbox.close()
        self._evidence.close()

    def __enter__(self) -> Migrations:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    # ---- messages

    def _receive(self, item: Received) -> None:
        if not self.take(item) and self._on_received is not None:
            self._on_received(item)

    def _hear_destination(self, peer: str, said: policy.DestinationSays) -> None:
        with self._lock:
            leaving = self._leaving.get(said.id)
            answer = None if leaving is not None else self._departures.answer(said)
        if leaving is not None:
            leaving.dialogue.post(said)
        elif answer is not None:
            self._mailbox.answer(peer, answer, self._timing.silence_s)

    # ---- ends

    def _left(self, leaving: Leaving, outcome: Migrated | Exception) -> None:
        self._tally.left(leaving.source.way, outcome)
        with self._lock:
            self._leaving.pop(leaving.source.id, None)
            self._departures.end(leaving.source)

    # ---- the rest

    def _find(self, to: str, timeout: float) -> int:
        """The incarnation of a peer, connected to if it is a member of the cluster."""
        found = self._evidence.incarnation(to)
        if found is None:
            self._pool._meet(to, timeout)
            found = self._evidence.incarnation(to)
        if found is None:
            raise PeerLost(f"there is no peer called {to!r}", peer=to)
        return found

    def _check_free(self, request: str) -> None:
        """Raises if a request cannot leave now. The caller holds the lock."""
        if self._closed:
            raise ClosedError("the migrations of this pool were closed")
        if any(each.source.request == request for each in self._leaving.values()):
            raise StateError(f"request {request!r} is on its way already")
        self._incoming.check_may_leave(request)


def _check_whole(pool: Pool) -> None:
    """Raises if the blocks of this pool are a rank's part of those of a logical instance."""
    if pool._ranks_here:
        raise StateError("this pool is the memory of a rank: requests migrate at the scheduler of its instance")
