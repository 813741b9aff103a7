"""The counts of a store."""

from __future__ import annotations

import threading

from kvpool.storage.store import StoreStats

__all__ = ["StoreCounter"]


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
