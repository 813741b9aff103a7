"""Discrete events: a virtual clock for millions of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Loop"]


class Loop:
    """Makes calls in the order of their times; those of one time in the order in which they were set.

    As `Clock`, for calls of one argument and without a closure for each.

    Attributes:
        now: Seconds since the start.
        events: The number of calls so far.
    """

    __slots__ = ("_heap", "_order", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = 0

    def at(self, time_s: float, call: Callable[[Any], None], argument: Any) -> None:
        """Schedules a call; one in the past happens next."""
        self._order += 1
        heapq.heappush(self._heap, (time_s if time_s > self.now else self.now, self._order, call, argument))

    def run_before(self, time_s: float) -> None:
        """Makes all calls before a time, those that they schedule included; then the clock shows that time."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] < time_s:
            self.now, _, call, argument = pop(heap)
            self.events += 1
            call(argument)
        if time_s != float("inf"):
            self.now = time_s
