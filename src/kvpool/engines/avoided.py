"""Members of a cluster that have failed lately, and are not asked for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

__all__ = ["Avoided"]


class Avoided:
    """Which members are not to be asked. Thread-safe.

    Args:
        clock: Seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """A member is not to be asked from now on for so long."""
        with self._lock:
            self._until[name] = self._clock() + seconds

    def without(self, names: Iterable[str]) -> list[str]:
        """Those of the names that may be asked now, in their order."""
        now = self._clock()
        with self._lock:
            self._until = {name: until for name, until in self._until.items() if until > now}
            return [name for name in names if name not in self._until]
