"""Virtual time: events happen in order, and no time passes between them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    """Runs events in the order of their times; those of one time in the order in which they were set.

    Attributes:
        now_s: Seconds since the start.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Schedules an event; one in the past happens next."""
        heapq.heappush(self._events, (max(time_s, self.now_s), self._count, event))
        self._count += 1

    def run(self, until_s: float) -> None:
        """Runs the events up to a time, that time included, and those that they schedule up to it."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = max(self.now_s, until_s)
