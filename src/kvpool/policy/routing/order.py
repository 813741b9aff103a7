"""The instances of a load table, in the order in which they become free: finding the least loaded needs no search.

As time passes, the backlogs of working instances shrink equally, and loads decay by one factor. So time alone changes
none of these orders, except when an instance passes the predicted end of its current request.

    idle      nothing to do                              by recent work per capacity
    running   the head of the queue is under way         by when the whole queue will be done
    waiting   the head takes longer than predicted, or   by what waits behind it, then by its load when it was entered,
              work does not pass by itself               as if all of that decayed from then on: a lower bound

Often nothing is queued behind a head that takes longer than predicted, so many instances have the same backlog.
Unfinished work does not decay, so the bound gets looser as time passes; a search that examines an instance without
choosing it enters it again. Instances with exactly the same finished and unfinished work, entered at about the same
time, are adjacent, and a search examines only the first of them.

The order contains instances that take new work and have a full share (`LoadTable`). A change costs two searches in a
sorted list and a shift of the following entries: a few microseconds for 16,384 instances, the maximum.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, NamedTuple

__all__ = ["LoadOrder", "Work"]


class Work(NamedTuple):
    """The work of an instance.

    Attributes:
        unfinished: All of it.
        head: That of the first request of its queue; 0 if work does not pass by itself.
        since: When that began.
    """

    unfinished: float
    head: float
    since: float


class LoadOrder:
    """Sorted lists of slots. Not thread-safe.

    Attributes:
        idle: (recent work per capacity, slot).
        running: (when it is free, slot).
        waiting: (backlog, load per capacity as if all of it were recent work, unfinished work, recent work, capacity,
            slot).
    """

    def __init__(self) -> None:
        self.idle: list[tuple[float, int]] = []
        self.running: list[tuple[float, int]] = []
        self.waiting: list[tuple[float, float, float, float, float, int]] = []
        self._due: list[tuple[float, int]] = []  # when what runs there should be done
        self._entries: dict[int, tuple[list[Any], Any, tuple[float, int] | None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    def put(self, slot: int, work: Work | None, done: float, capacity: float, now: float, faded: float) -> None:
        """Enters an instance, or enters it again.

        Args:
            slot: The instance's.
            work: Its work; None for none.
            done: Its recent work, in any unit that is the same for all.
            capacity: Relative to the others'.
            now: Seconds.
            faded: The part of `done` that is left now, or was a moment ago; not 0.
        """
        entry: Any
        due = None
        if work is None:
            line: list[Any] = self.idle
            entry = done / capacity, slot
        elif work.since + work.head > now:
            line = self.running
            entry = work.since + work.unfinished, slot
            due = work.since + work.head, slot
        else:
            line = self.waiting
            bound = (work.unfinished / faded + done) / capacity
            entry = work.unfinished - work.head, bound, work.unfinished, done, capacity, slot
        before = self._entries.get(slot)
        if before is not None:
            if before[0] is line and before[1] == entry and before[2] == due:
                return
            self.drop(slot)
        insort(line, entry)
        if due is not None:
            insort(self._due, due)
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
        """Slots whose head should be done by now: the caller enters them again."""
        if not self._due or self._due[0][0] > now:
            return []
        return [slot for _, slot in self._due[: bisect_left(self._due, (now, 1 << 62))]]

    def scale(self, factor: float) -> None:
        """Multiplies the recent work of all."""
        self.idle[:] = sorted((done * factor, slot) for done, slot in self.idle)  # entries that became 0 are equal
        self.waiting[:] = sorted(
            (backlog, bound * factor, unfinished, done * factor, capacity, slot)
            for backlog, bound, unfinished, done, capacity, slot in self.waiting
        )
        for line in (self.idle, self.waiting):
            for entry in line:
                self._entries[entry[-1]] = line, entry, None
