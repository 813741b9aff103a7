"""A pool as a member of a cluster: an `Attachment`, which `Pool.attach` makes (attach.py).

The directory says who is there; this tells the pool, whose C++ half meets members when a verb names them. Three threads
come with it, none on the way of a block: the cluster's own, which tells of the lease, and does what has to be done when
the pool leaves; one that hears of changes; one that publishes the load. None of them waits for another
(waiting/threads.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvpool import _core
from kvpool.cluster import Cluster, LeaseWord, Load, Member, MemberCallback, MemberEvent, Registration
from kvpool.cluster.place import check_seconds
from kvpool.errors import ClosedError, DeadlineExceeded, Error, Fenced, StateError
from kvpool.peers.member_table import MemberTable
from kvpool.transfer import PeerVerbs
from kvpool.waiting.threads import busy

__all__ = ["Attachment", "load_of"]

_log = logging.getLogger("kvpool.cluster")
_LOOK_S = 0.01  # how often drain looks
_MEET_S = 5.0  # for one peer that is met again after a lease was lost


class Attachment:
    """The membership of a pool, until it leaves. Made by `Pool.attach`; the pool keeps it, the caller need not.

    Any thread may call. Closing the pool or the cluster closes it. A pool that has left has no peers any more, and is
    not taken in again, since its addresses carry the id that it had: make a new one. After fork it is the parent's.
    """

    def __init__(self, pool: PeerVerbs, cluster: Cluster, registration: Registration) -> None:
        """Use `Pool.attach`."""
        self._pool = weakref.ref(pool)
        self._cluster = cluster
        self._registration = registration
        self._epoch = registration.record.epoch
        self._process = os.getpid()
        self._requests = 0
        self._own = threading.Lock()  # of its own lease: none that has left is let out of its fence again
        self._known_at = 0.0  # by when every peer has heard of the term that it is in (time.monotonic())
        self._stop = threading.Event()
        self._members = MemberTable(pool, self._epoch)
        cluster._directory.attest(self._members)
        self._watch: MemberCallback = cluster.on_change(_weakly(self._on_change))
        self._end = weakref.finalize(self, _leave_soon, registration, self._watch, self._process)
        cluster._board.subscribe(self._members.enter)
        registration._at_leave(functools.partial(cluster._board.unsubscribe, self._members.enter))
        registration._at_leave(_weakly(self._left))
        registration.on_lease(_weakly(self._on_lease))
        beats = threading.Thread(
            target=_beat_until,
            args=(self._stop, cluster.heartbeat_s, weakref.ref(self)),
            name="kvpool-attach",
            daemon=True,
        )
        beats.start()

    @property
    def name(self) -> str:
        """What the members call this pool, and its peers."""
        return self._registration.name

    @property
    def instance(self) -> int:
        """The number in the addresses of the pool's blocks, 1 to 16383: no other incarnation has it."""
        return self._registration.instance

    @property
    def closed(self) -> bool:
        """Whether the pool has left."""
        return self._registration.closed

    def report(self, *, requests: int) -> None:
        """Tells how many requests the engine has, running and waiting; goes out with the next load.

        Args:
            requests: At least 0.

        Raises:
            ArgumentError: It is negative.
            ArgumentTypeError: It is no int.
        """
        Load(requests=requests)  # which checks it
        self._requests = requests

    def drain(self, timeout: float = 30.0) -> None:
        """Leaves without disturbing anybody: tells "draining", waits until no transfer is under way, and leaves.

        Whoever chooses among members stops choosing this one when it hears so; what has been chosen before may still
        come, so at least one heartbeat passes without a transfer before it leaves. Blocks that are lent to others end
        with it. Ctrl-C ends the wait, and the member stays. It waits: a handler of a signal, which may have interrupted
        what this waits for, lets a thread call it.

        Args:
            timeout: Seconds.

        Raises:
            DeadlineExceeded: Transfers are still under way, or the directory has not taken the word. The member is
                there, and draining: call again, or `close`.
            ArgumentError: The timeout is negative or no number.
            ClosedError: It has left.
            StateError: Another incarnation has the name.
        """
        until = time.monotonic() + check_seconds("timeout", timeout)
        self._registration.publish(state="draining")
        quiet_since = time.monotonic()
        told = False  # others can only stop choosing it once the directory has it
        while True:
            pool = self._pool()
            if pool is None or pool.closed or self.closed:
                break
            if self._registration.refused:  # nobody listens to this one any more
                raise StateError(f"another incarnation has the name {self.name}")
            told = told or self._registration.written.state == "draining"
            under_way = sum(peer.transfers + peer.reserved_blocks for peer in pool.peers())
            now = time.monotonic()
            if under_way or not told:
                quiet_since = now
            elif now - quiet_since >= self._cluster.heartbeat_s:
                break
            if now >= until:
                left = f"{under_way} transfers and blocks of such are left"
                raise DeadlineExceeded(f"{self.name} is draining: {left if told else 'its cluster is not told yet'}")
            time.sleep(_LOOK_S)
        self.close()

    def close(self) -> None:
        """Leaves at once. The others are told "left"; transfers that are under way end with PeerLost. Idempotent.

        From a callback, of a pool or a cluster, or a finalizer that the garbage collector runs, it is done soon, as
        Cluster.close.
        """
        if os.getpid() == self._process:
            self._registration.leave()  # which calls _left
            self._watch.close()

    def _left(self) -> None:
        """It has left, whoever let it: no lease, no peers. Waits for no thread of the cluster's."""
        self._end.detach()
        self._stop.set()
        self._watch.stop()
        pool = self._pool()
        if pool is not None:
            with busy, self._own, contextlib.suppress(Error):  # it is closed: so are its connections
                pool._fence(f"{self.name} has left its cluster")

    def __enter__(self) -> Attachment:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves."""
        self.close()

    def __repr__(self) -> str:
        """Who it is."""
        return f"<Attachment {self.name}, instance {self.instance}{', left' if self.closed else ''}>"

    def _membership(self) -> dict[str, Any]:
        """What metrics tell of the cluster, as this pool sees it. Waits for nobody, and does not raise."""
        board, registration = self._cluster._board, self._registration
        return {
            "members": board.members(),
            "events": board.told(),
            "lease_valid": registration.lease_valid(),
            "leases_lost": registration.leases_lost,
            "renewals_failed": registration.renewals_failed,
        }

    # ---- what the directory tells

    def _on_change(self, event: MemberEvent) -> None:
        pool = self._pool()
        if pool is None or self.closed:
            return
        member = event.member
        with contextlib.suppress(ClosedError):
            if event.kind != "changed":
                self._members.remember_peers()
            if event.kind == "lost" and member.epoch != self._epoch and not self._is_back(member):
                pool._expel(member.epoch, f"the cluster has given up {member.name}")
            if event.kind == "joined":
                self._members.tell_again()
            elif event.kind == "left":
                self._members.forget(member.name)

    def _is_back(self, lost: Member) -> bool:
        """Whether it is listed again by now: it has no connection from before, so those that it has are new."""
        return any(one.epoch == lost.epoch and one.since_ns > lost.since_ns for one in self._cluster.members())

    # ---- what becomes of its own lease

    def _on_lease(self, word: LeaseWord) -> None:
        pool = self._pool()
        if pool is None:
            return
        with busy, self._own, contextlib.suppress(ClosedError):
            if self.closed:
                return  # the fence that it has now stays
            if word == "lost":
                self._keep_to_itself(pool)
            elif word == "regained":
                # A peer whose watch is dead notices it within a lease and a question. And no lease that has just been
                # granted runs out before.
                self._known_at = time.monotonic() + 2 * self._cluster.lease_s
                pool._unfence()
                args = pool, self._members.met()
                threading.Thread(target=_meet_again, args=args, name="kvpool-meet", daemon=True).start()
            else:
                pool._fence(f"another process is {self.name} in the cluster now, or has its instance id")

    def _look_at_clock(self, pool: PeerVerbs) -> None:
        """Fences the pool when its lease has lapsed, also while the cluster's thread is held up and says nothing.

        The same when a peer has refused it as one that was dropped. In a new term the peer may only not have heard of
        it yet: such a refusal is forgotten.
        """
        why = pool._dropped_by()
        if why and time.monotonic() >= self._known_at:
            self._registration.note_dropped(why)
        elif why:
            with busy, self._own, contextlib.suppress(ClosedError):
                if pool._dropped_by():  # so it has no fence, which would have to stay
                    pool._unfence()
        if not self._registration.lapsed():
            return
        with busy, self._own, contextlib.suppress(ClosedError):
            if not self.closed and self._registration.lapsed():
                self._keep_to_itself(pool)

    def _keep_to_itself(self, pool: PeerVerbs) -> None:
        """The caller has the lock of its own lease."""
        self._members.remember_peers()
        pool._fence(f"{self.name} has lost its lease in the cluster; it goes on when it has one again")

    # ---- load

    def _publish_load(self) -> bool:
        """False when there is nothing more to tell."""
        pool = self._pool()
        if pool is None or pool.closed or self.closed:
            self.close()
            return False
        self._look_at_clock(pool)
        with contextlib.suppress(StateError):  # it is just being closed; or another has the name
            self._members.remember_peers()
            self._registration.publish(load=load_of(pool, self._requests))
        return True


def load_of(pool: _core.Pool, requests: int) -> Load:
    """What a pool tells its cluster of itself, and what its engine has told it."""
    stats = pool._stats()
    hbm, dram = stats["hbm"], stats["dram"]
    return Load(
        hbm["free"], hbm["active"], hbm["historical"], dram["free"], dram["active"], dram["historical"], requests
    )


# ---- inside


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls the method as long as its object lives: what the cluster keeps must not keep the pool."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        strong = weak()
        if strong is not None:
            strong(*arguments)

    return call


def _beat_until(stop: threading.Event, heartbeat_s: float, attachment: weakref.ref[Attachment]) -> None:
    with busy:
        while not stop.wait(heartbeat_s):
            strong = attachment()
            try:
                if strong is None or not strong._publish_load():
                    return
            except Exception:  # this thread looks at the clock of the lease, so it must go on
                _log.exception("publishing the load has failed; it is tried again")
            del strong


def _meet_again(pool: PeerVerbs, names: list[str]) -> None:
    """What this pool could have written to is in quarantine at its peers until they hear from it."""
    with busy:
        for name in names:
            try:
                pool._meet(name, _MEET_S)
            except (ClosedError, Fenced):
                return  # it has left; or it has lost its lease again, and begins anew when that is back
            except Error as error:
                _log.info("%s was not met again: %s", name, error)


def _leave_soon(registration: Registration, watch: MemberCallback, process: int) -> None:
    """For an attachment that was dropped. Waits for nothing: the garbage collector may call it."""
    if os.getpid() == process:
        watch.stop()
        registration.leave_soon()
