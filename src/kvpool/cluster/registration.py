"""A member's own side: what it publishes, and what becomes of its lease."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from kvpool.cluster.directory import Entry, Unreachable
from kvpool.cluster.record import Load, Member
from kvpool.errors import ArgumentError, ClosedError, StateError
from kvpool.waiting.threads import busy, may_wait

__all__ = ["LeaseWord", "Registration"]

LeaseWord = Literal["lost", "regained", "refused"]

_log = logging.getLogger("kvpool.cluster")

_WHY: Final[dict[LeaseWord, str]] = {
    "lost": "peers have dropped it, it was stopped for longer than its lease, or another has its name or id",
    "regained": "name and id were taken back, in a new term",
    "refused": "another incarnation has its name or its id",
}


class Registration:
    """The membership of one pool: made by `Cluster.register`, ended by `leave` or with the cluster.

    Any thread may call. What is published is written by the cluster's thread, soon: this returns at once, also
    while the directory cannot be reached; then it is written when that is back.
    """

    def __init__(self, entry: Entry, heartbeat_s: float, wake: Callable[[], None]) -> None:
        """Use `Cluster.register`."""
        self._entry = entry
        self._heartbeat_s = heartbeat_s
        self._wake = wake
        self._lock = threading.RLock()  # of what follows; held for moments. A handler of a signal may publish, too
        self._wanted = entry.record
        self._written = entry.record
        self._written_at = time.monotonic()
        self._callbacks: list[Callable[[LeaseWord], object]] = []
        self._ends: list[Callable[[], object]] = []
        self._late: list[tuple[Callable[[LeaseWord], object], LeaseWord]] = []
        self._word: LeaseWord = "regained"
        self._over = False
        self._left = False
        self._asking = threading.Lock()  # the entry is asked by one at a time
        self._unreachable = False
        self._leases_lost = 0

    @property
    def name(self) -> str:
        """Of the member."""
        return self._wanted.name

    @property
    def instance(self) -> int:
        """The id given, 1 to 16383. It stays the same when a lease is lost and regained."""
        return self._wanted.instance

    @property
    def record(self) -> Member:
        """What is published, or will be as soon as it can be written."""
        return self._wanted

    @property
    def written(self) -> Member:
        """What the directory has been told last, and tells the others."""
        return self._written

    def publish(
        self,
        *,
        endpoints: Sequence[str] | None = None,
        load: Load | None = None,
        state: Literal["up", "draining"] | None = None,
    ) -> None:
        """Tells the others something new. What is not given stays as it is.

        Endpoints and state are written at once. A load is written only when it has changed, and at most once in a
        heartbeat, the newest: every member is told of every load. Give large clusters a longer heartbeat: what it
        costs is in docs/how-to/cluster.md.

        Args:
            endpoints: Where the pool is called.
            load: How busy it is.
            state: "draining": it wants nothing new; "up": it does again.

        Raises:
            ArgumentError: A value that no member can have; nothing is published.
            ArgumentTypeError: A value of the wrong type; the same.
            StateError: Another incarnation has the name.
            ClosedError: It has left.
        """
        if state not in (None, "up", "draining"):
            raise ArgumentError(f'publish: state is {state!r}; it must be "up" or "draining"')
        given: dict[str, Any] = {"endpoints": endpoints, "load": load, "state": state}
        with busy, self._lock:
            while True:
                self._check_open()
                before = self._wanted
                changed = dataclasses.replace(before, **{k: v for k, v in given.items() if v is not None})
                changed.to_bytes()  # which checks its length
                if before is self._wanted:  # no handler of a signal has published meanwhile, in this very thread
                    self._wanted = changed
                    break
        if endpoints is not None or state is not None:
            self._wake()

    def on_lease(self, callback: Callable[[LeaseWord], object]) -> None:
        """Calls back when something becomes of the lease, in the cluster's thread, which waits for it.

        "lost": a peer has dropped this member, because its record had run out and the link to it had ended; or it was
        stopped for longer than its lease; or another incarnation has its name or its id. It must fence itself: give up
        what it has under way with others, and what it holds there. When all callbacks have returned the name and the
        id are taken back, in a new term: "regained"; the member may go on, from nothing.
        "refused": another incarnation has the name now. This one must end, or register anew under another name.

        A directory that does not answer is no loss, also if the lease runs out meanwhile: blocks go on moving, and the
        member is entered again in silence when the directory is back, with what it knew or without.

        A callback that raises is logged. One that is added after a loss is told of it.
        """
        with busy, self._lock:
            self._callbacks.append(callback)
            if self._word != "regained":
                self._late.append((callback, self._word))
        self._wake()

    def lease_valid(self) -> bool:
        """Whether the lease is certainly held, as this process can tell by itself: no wait, no round trip.

        False from the moment that others may be told of a loss, which can be before `on_lease` says so; so also while
        the directory has not answered for a lease. What must be done by one holder of the name only has to ask
        this. Blocks need not: links between peers have leases of their own.
        """
        return not self._over and self._word == "regained" and self._entry.valid()

    def lapsed(self) -> bool:
        """Whether the lease is lost by this machine's clock alone, before `on_lease` has said so. No wait.

        What keeps it alive has not done so for longer than it lasts: the process was stopped, or the keeper of a lease
        in etcd hangs. Whoever has no time to wait for the cluster's thread, which may be held up, fences itself then;
        "lost" and "regained" follow. A directory that does not answer is no reason.
        """
        return not self._over and self._word == "regained" and self._entry.lapsed()

    def note_dropped(self, why: str) -> None:
        """A peer has refused this member, which it has dropped: the lease is lost. No wait."""
        if not self._over and self._word == "regained":
            self._entry.dropped(why)
            self._wake()

    @property
    def leases_lost(self) -> int:
        """How often the lease was lost, as `on_lease` says."""
        return self._leases_lost

    @property
    def renewals_failed(self) -> int:
        """How many renewals of the lease the directory has not answered. Always 0 on one machine."""
        return self._entry.renewals_failed()

    def leave(self) -> None:
        """Says goodbye. Others are told "left". Idempotent.

        From a callback, of a pool or a cluster, or a finalizer that the garbage collector runs, it is done soon: see
        waiting/threads.py.
        """
        self.leave_soon()
        if may_wait():
            self.leave_now()

    def leave_soon(self) -> None:
        """Lets the cluster's thread say goodbye. Waits for nothing."""
        self._over = True
        self._wake()

    @property
    def closed(self) -> bool:
        """Whether it has left."""
        return self._over

    @property
    def refused(self) -> bool:
        """Whether another incarnation has the name now, as `on_lease` says."""
        return self._word == "refused"

    def _at_leave(self, end: Callable[[], object]) -> None:
        """What else ends when it has left, whoever let it; in the thread that leaves. At once, if it has.

        It must not raise.
        """
        with busy, self._asking:
            if not self._left:
                self._ends.append(end)
                return
        end()

    def _check_open(self) -> None:
        if self._over:
            raise ClosedError(f"{self.name} has left the cluster")
        if self._word == "refused":
            raise StateError(f"another incarnation has the name {self.name}")

    # ---- for the tender (tender.py) and the cluster, which alone call what follows

    def leave_now(self) -> None:
        """Says goodbye, in this thread."""
        self._over = True
        with busy, self._asking:
            if self._left:
                return
            self._left = True
            try:
                self._entry.leave(self._written)
            finally:  # also when Ctrl-C ends a goodbye that takes its time: nobody tries again
                for end in self._ends:
                    end()

    def tend(self) -> None:
        """Sees to the lease, and writes what is to be written."""
        if self._over:
            self.leave_now()
            return
        self._tell_the_late()
        try:
            self._see_to_lease()
            if self._unreachable:
                _log.info("%s: the directory answers again", self.name, extra=self._fields("it answers again"))
                self._unreachable = False
        except Unreachable as error:
            if not self._unreachable:
                fields = self._fields(str(error))
                _log.warning("%s: the directory does not answer: %s", self.name, error, extra=fields)
                self._unreachable = True

    def abandon(self) -> None:
        """In a forked child."""
        self._over = True
        self._entry.abandon()

    def _see_to_lease(self) -> None:
        if self._word == "refused":
            return
        if self._word == "regained":
            with busy, self._asking:
                hold = "held" if self._over else self._entry.hold()
                if hold == "held":
                    self._write_if_due()
                    return
                if hold == "forgotten":
                    why = "the directory does not list it any more"
                    _log.info("%s enters again: %s", self.name, why, extra=self._fields(why))
            if hold == "lost":
                self._tell("lost")
        with busy, self._asking:
            if self._over:
                return
            wanted = self._wanted  # once: what is published meanwhile is written next time
            term = self._entry.enter_again(wanted, lost=self._word == "lost")
            if term is not None:
                self._note_written(dataclasses.replace(wanted, term=term))
        if term is None:
            self._tell("refused")
        elif self._word == "lost":
            self._tell("regained")

    def _write_if_due(self) -> None:
        wanted, written = self._wanted, self._written
        if self._over or wanted == written:
            return
        only_load = dataclasses.replace(wanted, load=written.load) == written
        if only_load and time.monotonic() < self._written_at + self._heartbeat_s:
            return
        self._entry.write(wanted)
        self._note_written(wanted)

    def _note_written(self, record: Member) -> None:
        with busy, self._lock:
            self._written = record
            self._written_at = time.monotonic()
            self._wanted = dataclasses.replace(self._wanted, term=record.term)

    def _tell(self, word: LeaseWord) -> None:
        level = logging.INFO if word == "regained" else logging.WARNING
        _log.log(level, "%s: lease %s", self.name, word, extra=self._fields(_WHY[word]) | {"event": word})
        with busy, self._lock:
            self._word = word
            self._leases_lost += word == "lost"
            callbacks = list(self._callbacks)
            self._late.clear()
        for callback in callbacks:
            self._call(callback, word)

    def _tell_the_late(self) -> None:
        with busy, self._lock:
            late, self._late = self._late, []
        for callback, word in late:
            self._call(callback, word)

    def _call(self, callback: Callable[[LeaseWord], object], word: LeaseWord) -> None:
        if self._over:
            return
        try:
            callback(word)
        except Exception:
            fields = self._fields("a callback of the application has raised")
            _log.exception("%s: a callback for the lease, which is %s, has failed", self.name, word, extra=fields)

    def _fields(self, why: str) -> dict[str, object]:
        return self._wanted._log_fields(why)
