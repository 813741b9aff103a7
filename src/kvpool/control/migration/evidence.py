"""What proves that an incarnation of a peer is gone: then it decodes nothing any more, or nobody listens to it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from kvpool.cluster import Cluster
from kvpool.errors import ClosedError
from kvpool.pool import Pool

__all__ = ["Evidence", "Proof"]

# "ended": its process has. "fenced": its lease has ended, so it may not act; it may wake up and ask.
Proof: TypeAlias = Literal["ended", "fenced"]


class Evidence:
    """Knows of each peer that takes part in a migration what would prove its end. Thread-safe.

    A peer on this host has ended when its process has. A member of the cluster is fenced when the cluster has given up
    its incarnation. A lost link proves nothing.

    Args:
        pool: Whose peers.
        cluster: Of the pool, if it is in one.
        gone: Asked with the name and the incarnation of a peer, if nothing else is proof.
    """

    def __init__(self, pool: Pool, cluster: Cluster | None, gone: Callable[[str, int], Proof | None] | None) -> None:
        self._pool = pool
        self._cluster = cluster
        self._gone = gone
        self._lock = threading.Lock()
        self._processes: dict[int, int] = {}  # a pidfd of each incarnation
        self._here: set[int] = set()  # incarnations of pools of this process
        self._members: set[int] = set()  # that the cluster has listed

    def incarnation(self, peer: str) -> int | None:
        """Which incarnation of a peer is connected; from now on its end is noticed. None: it is not connected."""
        info = self._find(peer)
        if info is None:
            return None
        found: int = info.incarnation
        with self._lock:
            self._note_members()
            if info.pid == os.getpid():
                self._here.add(found)
            elif info.link.startswith("unix") and found not in self._processes:
                with contextlib.suppress(OSError):
                    self._processes[found] = os.pidfd_open(info.pid)
        return found

    def of(self, peer: str, incarnation: int) -> Proof | None:
        """The proof that there is by now. Raises ClosedError when the pool is closed."""
        if self._pool.closed:
            raise ClosedError("the pool is closed")
        with self._lock:
            process = self._processes.get(incarnation)
            if process is not None and _has_ended(process):
                return "ended"
            is_here = incarnation in self._here
            self._note_members()
            fenced = incarnation in self._members and not self._is_member(incarnation)
        if is_here:
            info = self._find(peer)
            return "ended" if info is None or info.incarnation != incarnation else None
        if fenced:
            return "fenced"
        return None if self._gone is None else self._gone(peer, incarnation)

    def close(self) -> None:
        """Frees the descriptors. Idempotent."""
        with self._lock:
            for process in self._processes.values():
                os.close(process)
            self._processes.clear()

    def _find(self, peer: str) -> Any:
        return next((info for info in self._pool.peers if info.name == peer), None)

    def _note_members(self) -> None:
        if self._cluster is not None:
            self._members |= {member.incarnation for member in self._cluster.members()}

    def _is_member(self, incarnation: int) -> bool:
        return self._cluster is not None and any(
            member.incarnation == incarnation for member in self._cluster.members()
        )


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
