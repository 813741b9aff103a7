"""How fast a store may be written to, and when it is left alone. Pure, with the clock from outside; thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Breaker", "ByteBudget"]

_FAILURES: Final = 3
_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 60.0


class ByteBudget:
    """Bytes a second, over all writers together, with as much at once as one second has.

    Args:
        bytes_s: The budget; None: no limit.
        clock: Seconds, which only grow.
    """

    def __init__(self, bytes_s: float | None, clock: Callable[[], float]) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._lock = threading.Lock()
        self._left = 0.0 if bytes_s is None else bytes_s
        self._at = clock()

    def take(self, size: int) -> float:
        """Takes `size` bytes; the seconds to wait before writing them. More than the budget has is owed."""
        if self._bytes_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._left = min(self._bytes_s, self._left + (now - self._at) * self._bytes_s) - size
            self._at = now
            return max(0.0, -self._left / self._bytes_s)

    def give_back(self, size: int) -> None:
        """Of what was taken, this was not written."""
        with self._lock:
            self._left += size


class Breaker:
    """Switches something off that keeps failing, and tries it again after a pause, which doubles up to a minute.

    Args:
        clock: Seconds, which only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = _PAUSE_S
        self._until: float | None = None  # it is off, at least until then

    @property
    def off(self) -> bool:
        """Whether it is switched off."""
        return self._until is not None

    def allows(self) -> bool:
        """Whether to try. When a pause has passed, one caller tries, and the others after another pause."""
        with self._lock:
            if self._until is None:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._pause
            return True

    def succeeded(self) -> bool:
        """It works. Returns whether that switches it on again."""
        with self._lock:
            was_off = self._until is not None
            self._failures, self._pause, self._until = 0, _PAUSE_S, None
            return was_off

    def failed(self) -> bool:
        """It failed. Returns whether that switches it off, after it was on."""
        with self._lock:
            self._failures += 1
            if self._until is None and self._failures < _FAILURES:
                return False
            switched = self._until is None
            if not switched:
                self._pause = min(2 * self._pause, _PAUSE_MAX_S)
            self._until = self._clock() + self._pause
            return switched
