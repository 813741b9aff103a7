"""Connections to other members, made beside the engine's thread: a member that does not answer must delay no step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from kvpool.errors import Error
from kvpool.pool import Pool

__all__ = ["Links"]

_Then: TypeAlias = "Callable[[Error | None], None]"
_JOIN_S = 1.0  # at the end, for a call that the closed pool has ended


class Links:
    """Connects a pool to members of its cluster. Any thread may call.

    Each call is made by a thread, which ends with it. While a call to a member is under way no other is made to it.
    """

    def __init__(self, pool: Pool, timeout_s: float) -> None:
        """Of a pool.

        Args:
            pool: A member of a cluster.
            timeout_s: Seconds for a call.
        """
        self._pool = pool
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._calls: dict[str, list[_Then]] = {}  # by member: what follows the call
        self._threads: dict[str, threading.Thread] = {}
        self._refused: set[str] = set()  # the last call to these has failed

    def connected(self, member: str) -> bool:
        """Whether a verb that names the member need not connect first, unless the link ends before it does."""
        return any(peer.name == member for peer in self._pool.peers.list())

    def refused(self, member: str) -> bool:
        """Whether the last call to the member has failed."""
        with self._lock:
            return member in self._refused

    def connect(self, member: str, then: _Then | None = None) -> None:
        """Connects to a member. Does not wait.

        Args:
            member: Its name.
            then: Called when it is connected, with None, or when it cannot be, with the error; by another thread.
        """
        with self._lock:
            following = [then] if then is not None else []
            if member in self._calls:
                self._calls[member] += following
                return
            self._calls[member] = following
            thread = threading.Thread(target=self._call, args=(member,), name="kvpool-connect", daemon=True)
            self._threads[member] = thread
            thread.start()

    def close(self) -> None:
        """Waits for the threads. REQUIRES: the pool is closed, which ends the calls."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(_JOIN_S)

    def _call(self, member: str) -> None:
        error: Error | None = None
        try:
            self._pool._meet(member, self._timeout_s)
        except Error as refused:
            error = refused
        with self._lock:
            (self._refused.discard if error is None else self._refused.add)(member)
            following = self._calls.pop(member)
        for then in following:
            then(error)
        with self._lock:  # last: who waits for the thread waits for what follows the call, too
            if self._threads.get(member) is threading.current_thread():
                del self._threads[member]
