"""Connects a pool of a cluster to former peers again, on another thread.

Blocks that a lost peer may still write are quarantined until it is proved that it writes no more. A new connection to
it is such a proof, for both sides: each has ended what it wrote before. So a member that has lost its lease and
regained it connects to its former peers, and a member that has blocks in quarantine connects to the peers that they
wait for, as long as the cluster lists them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final

from kvpool.errors import ClosedError, Error, Fenced
from kvpool.peers.service import NetworkedPool
from kvpool.waiting.threads import busy

__all__ = ["Reconnector"]

_log = logging.getLogger("kvpool.cluster")
_TIMEOUT_S: Final = 5.0  # to connect to one peer


class Reconnector:
    """Works while there are names, and keeps the pool alive as long. Any thread may call."""

    def __init__(self) -> None:
        """Starts without names."""
        self._lock = threading.Lock()
        self._names: set[str] = set()  # still to be connected to
        self._working = False  # a thread is

    def connect(self, pool: NetworkedPool, names: Iterable[str]) -> None:
        """Connects to members soon, one after another. A failure is only logged: call again."""
        with busy, self._lock:
            self._names.update(names)
            if self._working or not self._names:
                return
            threading.Thread(target=self._run, args=(pool,), name="kvpool-meet", daemon=True).start()
            self._working = True

    def _run(self, pool: NetworkedPool) -> None:
        with busy:
            while (name := self._next()) is not None:
                try:
                    pool._meet(name, _TIMEOUT_S)
                except (ClosedError, Fenced):  # the pool has left, or reconnects when it has regained its lease
                    with self._lock:
                        self._names.clear()
                except Error as error:
                    _log.info("no new connection to %s: %s", name, error)

    def _next(self) -> str | None:
        """None: the thread ends."""
        with self._lock:
            self._working = bool(self._names)
            return self._names.pop() if self._names else None
