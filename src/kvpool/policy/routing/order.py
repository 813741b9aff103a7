"""The instances of a load board in the order in which they are free: who is least loaded is not searched for.

Backlogs of instances that work shrink, all alike, as time passes, and loads fade by one factor: so none of these orders
changes by time alone, but where an instance has passed the predicted end of what it does.

    idle      nothing to do                              by what each did lately, for its capacity
    running   the head of the queue is under way         by when all that waits will be done
    waiting   the head takes longer than predicted, or   by what waits behind it, then by what is unfinished, for its
              work does not pass by itself               capacity: a bound of the load from below

Here are instances that take new work and are no newcomers (`LoadBoard`). A change costs two searches in a sorted list,
and moving what lies behind in memory: a few microseconds at the 16,384 instances that there can be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, NamedTuple

__all__ = ["LoadOrder", "Work"]


class Work(NamedTuple):
    """What an instance has to do.

    Attributes:
        unfinished: All of it.
        head: Of the first of its queue; 0 of a queue where work does not pass by itself.
        since: When that began.
    """

    unfinished: float
    head: float
    since: float


class LoadOrder:
    """Sorted lists of slots. Not thread-safe.

    Attributes:
        idle: (what it did lately for its capacity, slot).
        running: (when it is free, slot).
        waiting: (its backlog, unfinished work for its capacity, slot).
    """

    def __init__(self) -> None:
        self.idle: list[tuple[float, int]] = []
        self.running: list[tuple[float, int]] = []
        self.waiting: list[tuple[float, float, int]] = []
        self._due: list[tuple[float, int]] = []  # when what runs there should be done
        self._entries: dict[int, tuple[list[Any], Any, tuple[float, int] | None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    def put(self, slot: int, work: Work | None, done: float, capacity: float, now: float) -> None:
        """Enters an instance, or enters it anew.

        Args:
            slot: Its.
            work: What it has to do; None for nothing.
            done: What it did lately, in any unit that is the same for all.
            capacity: Relative to the others'.
            now: Seconds.
        """
        self.drop(slot)
        entry: Any
        due = None
        if work is None:
            line: list[Any] = self.idle
            entry = done / capacity, slot
        elif work.since + work.head > now:
            line = self.running
            entry = work.since + work.unfinished, slot
            due = work.since + work.head, slot
            insort(self._due, due)
        else:
            line = self.waiting
            entry = work.unfinished - work.head, work.unfinished / capacity, slot
        insort(line, entry)
        self._entries[slot] = line, entry, due

    def drop(self, slot: int) -> None:
        """Takes an instance out, if it is in."""
        found = self._entries.pop(slot, None)
        if found is None:
            return
        line, entry, due = found
        del line[bisect_left(line, entry)]
        if due is not None:
            del self._due[bisect_left(self._due, due)]

    def overdue(self, now: float) -> list[int]:
        """Slots of those whose head should be done by now: to be put anew."""
        if not self._due or self._due[0][0] > now:
            return []
        return [slot for _, slot in self._due[: bisect_left(self._due, (now, 1 << 62))]]

    def scale(self, factor: float) -> None:
        """What was done lately counts so many times what it did, for all."""
        for at, (done, slot) in enumerate(self.idle):
            entry = done * factor, slot
            self.idle[at] = entry
            self._entries[slot] = self.idle, entry, None
        self.idle.sort()  # what has become nothing is alike
