"""Finished work counts less and less: half after each half-life.

All of it is counted as of one time, `then`, so one factor gives what is left of it, and no sum has to be updated as it
fades. Now and then that time is moved on, or numbers would grow forever.
"""

from __future__ import annotations

from math import inf, ldexp
from typing import Final

__all__ = ["Fading"]

_STEPS: Final = 1024  # a part of a half-life: over one moment nearly nothing fades
_LEAST: Final = 1e-300  # is divided by
_HALVINGS: Final = 64  # `then` is at most this many half-lives ago


class Fading:
    """Not thread-safe.

    Args:
        half_life_s: Seconds.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._then = 0.0
        self._known = 0.0, 1.0  # a time, and what is left then
        self._step = -1.0, 1.0  # a moment, and what was left when it began

    def left(self, now: float) -> float:
        """The part of finished work, as counted then, that is left."""
        if now != self._known[0]:
            self._known = now, 0.5 ** (max(0.0, now - self._then) / self._half_life_s)
        return self._known[1]

    def left_lately(self, now: float) -> float:
        """As `left`, or a little more; the same for all calls in one moment. Above 0."""
        step_s = self._half_life_s / _STEPS
        step = now // step_s
        if step != self._step[0]:
            began = min(now, step * step_s)
            self._step = step, max(_LEAST, 0.5 ** (max(0.0, began - self._then) / self._half_life_s))
        return self._step[1]

    def is_due(self, now: float) -> bool:
        """Whether `move_on` is to be called."""
        return now - self._then > _HALVINGS * self._half_life_s

    def move_on(self, now: float) -> float:
        """Moves the time of counting to now.

        Returns:
            The factor for everything that was counted: a power of two or 0, so that nothing is rounded.
        """
        passed = now - self._then
        self._then = now - passed % self._half_life_s
        self._known = self._step = -inf, 1.0  # no longer
        return ldexp(1.0, -int(min(passed // self._half_life_s, 1e4)))
