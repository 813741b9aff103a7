"""Names of members of a cluster that are remembered for a while: those that have failed, or have what is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

__all__ = ["Remembered"]


class Remembered:
    """Names, each until its time is over. Thread-safe.

    Args:
        clock: Seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """Remembers a name from now on for so long, also if it is remembered already."""
        with self._lock:
            self._until[name] = self._clock() + seconds

    def names(self) -> set[str]:
        """Those that are remembered now."""
        now = self._clock()
        with self._lock:
            self._until = {name: until for name, until in self._until.items() if until > now}
            return set(self._until)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are not remembered now, in their order."""
        remembered = self.names()
        return [name for name in names if name not in remembered]
