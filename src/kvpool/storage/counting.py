"""The counts of a store, and messages that come once in a while."""

from __future__ import annotations

import threading
import time
from typing import Final

from kvpool.storage.store import StoreStats

__all__ = ["Seldom", "StoreCounter"]

_EVERY_S: Final = 30.0


class Seldom:
    """Says when a message about something that keeps happening is due. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0.0
        self._silent = 0

    def due(self, at_once: bool = False) -> int:
        """It has happened again: how often since the last message, this time included; 0 if no message is due."""
        with self._lock:
            self._silent += 1
            now = time.monotonic()
            if now < self._next and not at_once:
                return 0
            self._next = now + _EVERY_S
            happened, self._silent = self._silent, 0
            return happened


class StoreCounter:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._stats = StoreStats()
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Adds to the fields of `StoreStats` of these names."""
        with self._lock:
            for name, more in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + more)

    def read(self, *, read_only: bool = False) -> StoreStats:
        """A copy."""
        with self._lock:
            return StoreStats(**{**vars(self._stats), "read_only": read_only})
