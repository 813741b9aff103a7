"""What proves that an incarnation of a peer is gone: then it decodes nothing any more, or nobody listens to it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import weakref
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from kvpool.cluster import Cluster, MemberEvent
from kvpool.errors import ClosedError, PeerLost
from kvpool.policy.migration.recent import Recent
from kvpool.pool import Pool

__all__ = ["Evidence", "Proof"]

_log = logging.getLogger("kvpool.migration")

# "ended": its process has. "fenced": its lease has ended, so it may not act; it may wake up and ask.
Proof: TypeAlias = Literal["ended", "fenced"]

_PEERS_MAX: Final = 4096  # that are remembered, of those that were met: the latest

_HERE: Final[weakref.WeakValueDictionary[int, Pool]] = weakref.WeakValueDictionary()  # of this process, by incarnation


class _Departed:
    """Which incarnations are members of the cluster no more: all that it has listed since this began. Thread-safe.

    Args:
        cluster: Says who joins and who is lost.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._lock = threading.Lock()
        self._found: Recent[int, None] = Recent(_PEERS_MAX)
        self._watch = cluster.on_change(self._note)

    def __contains__(self, incarnation: int) -> bool:
        with self._lock:
            return incarnation in self._found

    def close(self) -> None:
        """Hears of no more. Does not wait. Idempotent."""
        self._watch.stop()

    def _note(self, event: MemberEvent) -> None:
        if event.kind in ("left", "lost"):
            with self._lock:
                self._found.put(event.member.incarnation, None)


class Evidence:
    """Knows of each peer that takes part in a migration what would prove its end. Thread-safe.

    A peer on this host has ended when its process has; one in this process, when its pool was closed. A member of the
    cluster is fenced when the cluster has given up its incarnation, whenever that was met. A lost link proves nothing,
    and neither does a cluster that cannot be asked.

    Args:
        pool: Whose peers.
        cluster: Of the pool, if it is in one.
        gone: Asked with the name and the incarnation of a peer, if nothing else proves that it has ended.
    """

    def __init__(self, pool: Pool, cluster: Cluster | None, gone: Callable[[str, int], Proof | None] | None) -> None:
        self._pool = pool
        self._cluster = cluster
        self._gone = gone
        self._lock = threading.Lock()
        self._closed = False
        self._processes: dict[int, int] = {}  # a pidfd of each incarnation that has not ended
        self._ended: Recent[int, None] = Recent(_PEERS_MAX)  # whose processes have
        # Incarnations in this process; None: it has had no migrations so far.
        self._here: Recent[int, weakref.ref[Pool] | None] = Recent(_PEERS_MAX)
        self._departed = None if cluster is None else _departed_from(cluster)
        if self._departed is not None:  # its thread does not outlive what asks
            weakref.finalize(self, self._departed.close)
        _HERE[pool._incarnation()] = pool

    @property
    def closed(self) -> bool:
        """Whether the pool is closed: nothing is heard or proved any more."""
        return self._pool.closed

    def lost(self) -> PeerLost | None:
        """Why this instance has no memory any more, and is heard by no peer: a rank of it is lost. None: it has."""
        if self._pool.closed or self._pool.ranks.parallel is None:
            return None
        lost = [one.rank for one in self._pool.ranks if one.joined and one.link == "closed"]
        return PeerLost(f"ranks {lost} of this instance are lost, and the instance with them") if lost else None

    def incarnation(self, peer: str) -> int | None:
        """Which incarnation of a peer is connected; from now on its end is noticed. None: it is not connected."""
        info = next((info for info in self._pool.peers if info.name == peer), None)
        if info is None:
            return None
        found: int = info.incarnation
        with self._lock:
            if info.pid == os.getpid():
                self._meet(found)
            elif self._closed:
                pass  # nobody would close its descriptor
            elif info.link.startswith("unix") and found not in self._processes and found not in self._ended:
                self._close_ended()
                with contextlib.suppress(OSError):
                    self._processes[found] = os.pidfd_open(info.pid)
        return found

    def of(self, peer: str, incarnation: int) -> Proof | None:
        """The proof that there is by now. Raises ClosedError when the pool is closed."""
        if self._pool.closed:
            raise ClosedError("the pool is closed")
        with self._lock:
            self._close_if_ended(incarnation)
            if incarnation in self._ended:
                return "ended"
            if incarnation in self._here:
                pool = self._meet(incarnation)
                if pool is not None and ((one := pool()) is None or one.closed):
                    return "ended"
        fenced = self._is_fenced(incarnation)
        told = self._ask_engine(peer, incarnation)  # it may know that the host is gone: one that is fenced may wake
        return "fenced" if fenced and told is None else told

    def close(self) -> None:
        """Frees the descriptors. Idempotent."""
        if self._departed is not None:
            self._departed.close()
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                os.close(process)
            self._processes.clear()

    def _meet(self, incarnation: int) -> weakref.ref[Pool] | None:
        """The pool of this process that is this incarnation; None if it has had no migrations so far."""
        found = self._here.get(incarnation)
        if found is None:
            pool = _HERE.get(incarnation)
            found = None if pool is None else weakref.ref(pool)
        self._here.put(incarnation, found)
        return found

    def _close_if_ended(self, incarnation: int) -> None:
        """A process that has ended needs no descriptor any more."""
        process = self._processes.get(incarnation)
        if process is not None and _has_ended(process):
            os.close(self._processes.pop(incarnation))
            self._ended.put(incarnation, None)

    def _close_ended(self) -> None:
        for incarnation in list(self._processes):
            self._close_if_ended(incarnation)

    def _is_fenced(self, incarnation: int) -> bool:
        """Whether it was a member, and is one no longer: one that has come back, in another term, can be asked."""
        if self._cluster is None or self._departed is None or incarnation not in self._departed:
            return False
        try:
            return all(member.incarnation != incarnation for member in self._cluster.members())
        except Exception:  # it was closed first, or its directory cannot be reached
            _log.warning("the cluster does not say who its members are", exc_info=True)
            return False

    def _ask_engine(self, peer: str, incarnation: int) -> Proof | None:
        if self._gone is None:
            return None
        try:
            return self._gone(peer, incarnation)
        except Exception:  # the engine's: no proof
            _log.exception("gone= does not say whether %s is gone", peer, extra={"peer": peer})
            return None


def _departed_from(cluster: Cluster) -> _Departed | None:
    """None if the cluster is closed: then it proves nothing."""
    try:
        return _Departed(cluster)
    except ClosedError:
        return None


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
