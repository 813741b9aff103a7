"""A member's registration: what it publishes, and the state of its lease."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from kvpool.cluster.directory import Entry, Unreachable
from kvpool.cluster.record import Load, Member
from kvpool.errors import ArgumentError, ClosedError, StateError
from kvpool.waiting.threads import busy, may_wait

__all__ = ["LeaseEvent", "Registration"]

LeaseEvent = Literal["lost", "regained", "refused"]

_log = logging.getLogger("kvpool.cluster")

_WHY: Final[dict[LeaseEvent, str]] = {
    "lost": "peers have dropped it, it was stopped for longer than its lease, or another member has its name or id",
    "regained": "it has its name and id again, in a new term",
    "refused": "another incarnation has its name or its id",
}


class Registration:
    """The membership of one pool: made by `Cluster.register`, ended by `leave` or with the cluster.

    Any thread may call. `publish` returns at once; the cluster's thread writes soon after, or when the directory
    answers again.
    """

    def __init__(self, entry: Entry, heartbeat_s: float, wake: Callable[[], None]) -> None:
        """Use `Cluster.register`."""
        self._entry = entry
        self._heartbeat_s = heartbeat_s
        self._wake = wake
        self._lock = (
            threading.RLock()
        )  # of the fields below; held briefly. Reentrant: a signal handler may publish, too
        self._wanted = entry.record
        self._written = entry.record
        self._written_at = time.monotonic()
        self._callbacks: list[Callable[[LeaseEvent], object]] = []
        self._at_leaves: list[Callable[[], object]] = []
        self._untold: list[tuple[Callable[[LeaseEvent], object], LeaseEvent]] = []
        self._lease: LeaseEvent = "regained"
        self._leaving = False
        self._left = False
        self._entry_lock = threading.Lock()  # one thread at a time uses the entry
        self._unreachable = False
        self._leases_lost = 0

    @property
    def name(self) -> str:
        """The member's name."""
        return self._wanted.name

    @property
    def instance(self) -> int:
        """The assigned id, 1 to 16383. It stays the same when a lease is lost and regained."""
        return self._wanted.instance

    @property
    def record(self) -> Member:
        """The record as published. It may not be written yet."""
        return self._wanted

    @property
    def written(self) -> Member:
        """The record that was written to the directory last, which the others see."""
        return self._written

    def publish(
        self,
        *,
        endpoints: Sequence[str] | None = None,
        load: Load | None = None,
        lending: Mapping[str, Any] | None = None,
        rebalancing: Mapping[str, Any] | None = None,
        state: Literal["up", "draining"] | None = None,
    ) -> None:
        """Publishes changes to the other members. Arguments that are None leave their field unchanged.

        Endpoints and state are written at once. Changes of load, lending and rebalancing are written at most once a
        heartbeat, because every member receives each of them. Give large clusters a longer heartbeat;
        docs/how-to/cluster.md has the costs.

        Args:
            endpoints: The addresses at which the pool listens.
            load: How busy it is.
            lending: What it lends and owes, as JSON.
            rebalancing: What it runs and plans, as JSON.
            state: "draining": it takes no new work; "up": it does.

        Raises:
            ArgumentError: An invalid value; nothing is published.
            ArgumentTypeError: A value of the wrong type; nothing is published.
            StateError: Another incarnation has the name.
            ClosedError: It has left.
        """
        if state not in (None, "up", "draining"):
            raise ArgumentError(f'publish: state is {state!r}; it must be "up" or "draining"')
        given: dict[str, Any] = {"endpoints": endpoints, "load": load, "lending": lending, "state": state}
        given |= {"rebalancing": rebalancing}
        with busy, self._lock:
            while True:
                self._check_open()
                before = self._wanted
                changed = dataclasses.replace(before, **{k: v for k, v in given.items() if v is not None})
                changed.to_bytes()  # checks its length
                if before is self._wanted:  # no signal handler has published meanwhile in this thread
                    self._wanted = changed
                    break
        if endpoints is not None or state is not None:
            self._wake()

    def on_lease(self, callback: Callable[[LeaseEvent], object]) -> None:
        """Calls `callback` when the state of the lease changes. The cluster's thread calls it, and waits for it.

        "lost": a peer has dropped this member, because its record had expired and the link to it had ended; or the
        process was stopped for longer than its lease; or another incarnation has its name or id. The member must fence
        itself: end its transfers with others, and give up the blocks that it has reserved or borrowed there.
        "regained": after all callbacks have returned from "lost", the member got its name and id back, in a new term.
        It starts again with no peers.
        "refused": another incarnation has the name. This member must end, or register again under another name.

        A directory that does not answer causes no loss, even if the lease expires meanwhile. Blocks go on moving, and
        the member is entered again without an event when the directory answers, with its data or without.

        An exception of a callback is logged. A callback that is added after a loss is called for that loss.
        """
        with busy, self._lock:
            self._callbacks.append(callback)
            if self._lease != "regained":
                self._untold.append((callback, self._lease))
        self._wake()

    def lease_valid(self) -> bool:
        """Whether this process knows that the lease is held, without waiting or a round trip.

        False as soon as others may have been told of a loss, which can be before `on_lease` reports it; and so also
        when the directory has not answered for the length of a lease. Check this before an action that only the one
        holder of the name may take. Transfers need no check: each link between peers has a separate lease.
        """
        return not self._leaving and self._lease == "regained" and self._entry.valid()

    def lapsed(self) -> bool:
        """Whether the lease is lost by this machine's clock alone, before `on_lease` has said so. No wait.

        True if nothing has renewed it for longer than it lasts: the process was stopped, or the lease renewer hangs. A
        caller that cannot wait for the cluster's thread, which may be delayed, fences itself; "lost" and "regained"
        follow. A directory that does not answer does not make the lease lapse.
        """
        return not self._leaving and self._lease == "regained" and self._entry.lapsed()

    def note_dropped(self, why: str) -> None:
        """Notes that a peer has dropped this member, so the lease is lost. No wait."""
        if not self._leaving and self._lease == "regained":
            self._entry.dropped(why)
            self._wake()

    @property
    def leases_lost(self) -> int:
        """How often `on_lease` reported "lost"."""
        return self._leases_lost

    @property
    def renewals_failed(self) -> int:
        """How many renewals of the lease the directory did not answer. Always 0 on one machine."""
        return self._entry.renewals_failed()

    def leave(self) -> None:
        """Leaves the cluster. The others see "left". Idempotent.

        Called from a callback of a pool or a cluster, or from a finalizer that the garbage collector runs, this only
        schedules the leave: see waiting/threads.py.
        """
        self.leave_soon()
        if may_wait():
            self.leave_now()

    def leave_soon(self) -> None:
        """Schedules the leave in the cluster's thread. Does not wait."""
        self._leaving = True
        self._wake()

    @property
    def closed(self) -> bool:
        """Whether it has left, or is about to."""
        return self._leaving

    @property
    def refused(self) -> bool:
        """Whether another incarnation has the name, as `on_lease` reports."""
        return self._lease == "refused"

    def _at_leave(self, end: Callable[[], object]) -> None:
        """Calls `end` after the leave, in the thread that leaves; at once if it has left. `end` must not raise."""
        with busy, self._entry_lock:
            if not self._left:
                self._at_leaves.append(end)
                return
        end()

    def _check_open(self) -> None:
        if self._leaving:
            raise ClosedError(f"{self.name} has left the cluster")
        if self._lease == "refused":
            raise StateError(f"another incarnation has the name {self.name}")

    # ---- only the cluster and its MembershipLoop call the methods below

    def leave_now(self) -> None:
        """Leaves, in this thread."""
        self._leaving = True
        with busy, self._entry_lock:
            if self._left:
                return
            self._left = True
            try:
                self._entry.leave(self._written)
            finally:  # also when Ctrl-C interrupts a slow leave: there is no second attempt
                for end in self._at_leaves:
                    end()

    def maintain(self) -> None:
        """Checks the lease, and writes the record if it is due."""
        if self._leaving:
            self.leave_now()
            return
        self._call_untold()
        try:
            self._check_lease()
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
        self._leaving = True
        self._entry.abandon()

    def _check_lease(self) -> None:
        if self._lease == "refused":
            return
        if self._lease == "regained":
            with busy, self._entry_lock:
                state = "held" if self._leaving else self._entry.check_lease()
                if state == "held":
                    self._write_if_due()
                    return
                if state == "forgotten":
                    why = "the directory no longer lists it"
                    _log.info("%s enters again: %s", self.name, why, extra=self._fields(why))
            if state == "lost":
                self._report("lost")
        with busy, self._entry_lock:
            if self._leaving:
                return
            wanted = self._wanted  # read once: a later change is written next time
            term = self._entry.enter_again(wanted, lost=self._lease == "lost")
            if term is not None:
                self._note_written(dataclasses.replace(wanted, term=term))
        if term is None:
            self._report("refused")
        elif self._lease == "lost":
            self._report("regained")

    def _write_if_due(self) -> None:
        wanted, written = self._wanted, self._written
        if self._leaving or wanted == written:
            return
        patient = {name: getattr(written, name) for name in ("load", "lending", "rebalancing")}
        if (
            dataclasses.replace(wanted, **patient) == written
            and time.monotonic() < self._written_at + self._heartbeat_s
        ):
            return
        self._entry.write(wanted)
        self._note_written(wanted)

    def _note_written(self, record: Member) -> None:
        with busy, self._lock:
            self._written = record
            self._written_at = time.monotonic()
            self._wanted = dataclasses.replace(self._wanted, term=record.term)

    def _report(self, event: LeaseEvent) -> None:
        level = logging.INFO if event == "regained" else logging.WARNING
        _log.log(level, "%s: lease %s", self.name, event, extra=self._fields(_WHY[event]) | {"event": event})
        with busy, self._lock:
            self._lease = event
            self._leases_lost += event == "lost"
            callbacks = list(self._callbacks)
            self._untold.clear()
        for callback in callbacks:
            self._call(callback, event)

    def _call_untold(self) -> None:
        with busy, self._lock:
            untold, self._untold = self._untold, []
        for callback, event in untold:
            self._call(callback, event)

    def _call(self, callback: Callable[[LeaseEvent], object], event: LeaseEvent) -> None:
        if self._leaving:
            return
        try:
            callback(event)
        except Exception:
            fields = self._fields("a callback of the application raised an exception")
            _log.exception("%s: a callback for the lease event %s has failed", self.name, event, extra=fields)

    def _fields(self, why: str) -> dict[str, object]:
        return self._wanted._log_fields(why)
