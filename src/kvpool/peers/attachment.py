"""A pool as a member of a cluster: an `Attachment`, which `Pool.attach` makes (attach.py).

The directory reports the members, and this passes them to the pool, whose C++ half connects to a member when a verb
names it. Three threads work for an attachment, none of them on the path of a block: the cluster's, which reports
changes of the lease and runs the leave; one for the changes of members; and one that publishes the load. None of them
waits for another (waiting/threads.py).
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
from kvpool.cluster import Cluster, LeaseEvent, Load, Member, MemberCallback, MemberEvent, Registration
from kvpool.cluster.cluster_url import check_seconds
from kvpool.errors import ClosedError, DeadlineExceeded, Error, StateError
from kvpool.peers.member_table import MemberTable
from kvpool.peers.peers import Peers
from kvpool.peers.reconnector import Reconnector
from kvpool.peers.service import NetworkedPool
from kvpool.waiting.threads import busy

__all__ = ["Attachment", "load_of"]

_log = logging.getLogger("kvpool.cluster")
_POLL_S = 0.01  # between two checks of drain


class Attachment:
    """The membership of a pool, until it leaves. Made by `Pool.attach`. The pool keeps it; the caller need not.

    Any thread may call. Closing the pool or the cluster closes it. A pool that has left has no peers and cannot attach
    again, because its addresses contain its old id: make a new pool. After fork it belongs to the parent.
    """

    def __init__(self, pool: NetworkedPool, cluster: Cluster, registration: Registration) -> None:
        """Use `Pool.attach`."""
        self._pool = weakref.ref(pool)
        self._timeout_s = pool.settings.timeout_s
        self._cluster = cluster
        self._registration = registration
        self._incarnation = registration.record.incarnation
        self._process = os.getpid()
        self._requests = 0
        self._fence_lock = threading.Lock()  # guards the fence: a pool that has left stays fenced
        self._known_at = 0.0  # when every peer knows the current term (time.monotonic())
        self._stop = threading.Event()
        self._members = MemberTable(pool, self._incarnation)
        self._reconnector = Reconnector()
        cluster._directory.use_links(self._members)
        self._watch: MemberCallback = cluster.on_change(_weakly(self._on_change))
        self._end = weakref.finalize(self, _leave_soon, registration, self._watch, self._process)
        cluster._view.subscribe(self._members.enter)
        registration._at_leave(functools.partial(cluster._view.unsubscribe, self._members.enter))
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
        """The name of the pool among members and peers."""
        return self._registration.name

    @property
    def instance(self) -> int:
        """The number in the addresses of the pool's blocks, 1 to 16383. No other incarnation has it."""
        return self._registration.instance

    @property
    def closed(self) -> bool:
        """Whether the pool has left."""
        return self._registration.closed

    def report(self, *, requests: int) -> None:
        """Sets the number of running and waiting requests of the engine, which is published with the next load.

        Args:
            requests: At least 0.

        Raises:
            ArgumentError: It is negative.
            ArgumentTypeError: It is not an int.
        """
        Load(requests=requests)  # checks it
        self._requests = requests

    def drain(self, timeout: float | None = None) -> None:
        """Leaves gracefully: publishes "draining", waits until no transfer is in progress, and leaves.

        Schedulers stop choosing this member when they see "draining". Work that they assigned before may still arrive,
        so the member leaves only after a heartbeat without a transfer. Blocks lent to others end with the leave. Ctrl-C
        ends the wait, and the member stays. A signal handler must call this from another thread, because it may have
        interrupted the code that this waits for.

        Args:
            timeout: Seconds; None: the setting ``timeout_s``.

        Raises:
            DeadlineExceeded: Transfers are still in progress, or the directory does not have the new state yet. The
                member stays, draining: call again, or `close`.
            ArgumentError: The timeout is negative or not a number.
            ClosedError: The pool has left.
            StateError: Another incarnation has the name.
        """
        until = time.monotonic() + (self._timeout_s if timeout is None else check_seconds("timeout", timeout))
        self._registration.publish(state="draining")
        quiet_since = time.monotonic()
        told = False  # schedulers see the state only once the directory has it
        while True:
            pool = self._pool()
            if pool is None or pool.closed or self.closed:
                break
            if self._registration.refused:  # the others ignore this member
                raise StateError(f"another incarnation has the name {self.name}")
            told = told or self._registration.written.state == "draining"
            under_way = sum(peer.transfers + peer.reserved_blocks for peer in Peers(pool))
            now = time.monotonic()
            if under_way or not told:
                quiet_since = now
            elif now - quiet_since >= self._cluster.heartbeat_s:
                break
            if now >= until:
                left = f"{under_way} transfers and reserved blocks are left"
                raise DeadlineExceeded(f"{self.name} is draining: {left if told else 'its cluster is not told yet'}")
            time.sleep(_POLL_S)
        self.close()

    def close(self) -> None:
        """Leaves at once. The others see "left"; transfers in progress end with PeerLost. Idempotent.

        Called from a callback of a pool or a cluster, or from a finalizer that the garbage collector runs, it only
        schedules the leave, as Cluster.close does.
        """
        if os.getpid() == self._process:
            self._registration.leave()  # calls _left
            self._watch.close()

    def _left(self) -> None:
        """Runs after the leave, whatever caused it: fences the pool. Waits for no thread of the cluster."""
        self._end.detach()
        self._stop.set()
        self._watch.stop()
        pool = self._pool()
        if pool is not None:
            with busy, self._fence_lock, contextlib.suppress(Error):  # a closed pool has no connections
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
        """Name and id of the member."""
        return f"<Attachment {self.name}, instance {self.instance}{', left' if self.closed else ''}>"

    def _membership(self) -> dict[str, Any]:
        """The cluster as this pool sees it, for metrics. Does not wait or raise."""
        view, registration = self._cluster._view, self._registration
        return {
            "members": view.members(),
            "events": view.event_counts(),
            "lease_valid": registration.lease_valid(),
            "leases_lost": registration.leases_lost,
            "renewals_failed": registration.renewals_failed,
        }

    # ---- changes of members

    def _on_change(self, event: MemberEvent) -> None:
        pool = self._pool()
        if pool is None or self.closed:
            return
        member = event.member
        with contextlib.suppress(ClosedError):
            if event.kind != "changed":
                self._members.remember_peers()
            if event.kind == "lost" and member.incarnation != self._incarnation and not self._is_back(member):
                pool._expel(member.incarnation, f"the cluster has given up {member.name}")
            if event.kind == "joined":
                self._members.pass_again()
            elif event.kind == "left":
                self._members.forget(member.name)

    def _is_back(self, lost: Member) -> bool:
        """Whether it has joined again since: then its connections are new and must stay."""
        return any(
            one.incarnation == lost.incarnation and one.since_ns > lost.since_ns for one in self._cluster.members()
        )

    # ---- the lease of this member

    def _on_lease(self, event: LeaseEvent) -> None:
        pool = self._pool()
        if pool is None:
            return
        with busy, self._fence_lock, contextlib.suppress(ClosedError):
            if self.closed:
                return  # it stays fenced
            if event == "lost":
                self._fence_pool(pool)
            elif event == "regained":
                # A peer whose watch is dead notices within a lease plus a request, and the newly granted lease does not
                # expire before that.
                self._known_at = time.monotonic() + 2 * self._cluster.lease_s
                pool._unfence()
                self._reconnector.connect(pool, self._members.peers_to_reconnect())
            else:
                pool._fence(f"another process is {self.name} in the cluster now, or has its instance id")

    def _check_clock(self, pool: NetworkedPool) -> None:
        """Fences the pool when its lease has lapsed, even while the cluster's thread is delayed.

        Also notes when a peer has refused this member because it had dropped it. Just after the start of a new term the
        peer may not know that term yet, so such a refusal is ignored.
        """
        why = pool._dropped_by()
        if why and time.monotonic() >= self._known_at:
            self._registration.note_dropped(why)
        elif why:
            with busy, self._fence_lock, contextlib.suppress(ClosedError):
                if pool._dropped_by():  # then it is not fenced for another reason, and may be unfenced
                    pool._unfence()
        if not self._registration.lapsed():
            return
        with busy, self._fence_lock, contextlib.suppress(ClosedError):
            if not self.closed and self._registration.lapsed():
                self._fence_pool(pool)

    def _fence_pool(self, pool: NetworkedPool) -> None:
        """The caller holds _fence_lock."""
        self._members.remember_peers()
        pool._fence(f"{self.name} has lost its lease in the cluster; it goes on when it has regained it")

    # ---- load

    def _publish_load(self) -> bool:
        """False when the pool or the membership has ended."""
        pool = self._pool()
        if pool is None or pool.closed or self.closed:
            self.close()
            return False
        self._check_clock(pool)
        with contextlib.suppress(StateError):  # it is being closed, or another incarnation has the name
            self._members.remember_peers()
            self._registration.publish(load=load_of(pool, self._requests))
            self._reconnector.connect(pool, self._members.names() & set(pool._awaited_writers()))
        return True


def load_of(pool: _core.Pool, requests: int) -> Load:
    """The load of a pool: its blocks, and the requests that its engine reports."""
    stats = pool._stats()
    hbm, dram = stats["hbm"], stats["dram"]
    return Load(
        hbm["free"], hbm["active"], hbm["historical"], dram["free"], dram["active"], dram["historical"], requests,
        stats["requested_tokens"], stats["matched_tokens"],
    )  # fmt: skip


# ---- inside


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls the method while its object lives, so that the cluster does not keep the pool alive."""
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
            except Exception:  # this thread checks the clock of the lease, so it must go on
                _log.exception("publishing the load has failed; it is tried again")
            del strong


def _leave_soon(registration: Registration, watch: MemberCallback, process: int) -> None:
    """Leaves for a dropped attachment. Does not wait, because the garbage collector may call it."""
    if os.getpid() == process:
        watch.stop()
        registration.leave_soon()
