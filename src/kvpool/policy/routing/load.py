"""How much work each instance has, and which may get more: arrays over all instances, in NumPy.

Work is in seconds for instances that prefill, in tokens for those that decode. An instance's *load* is what it has not
finished, and what it finished lately, which fades with a half-life: so a load cap binds not only when queues have
grown.

    may get more:  load / share <= max(cap * sum of loads / sum of shares, what an idle one does) + slack

`share` is the instance's capacity relative to the largest, and less while it is newer than others. The least loaded
instance always may, for its load / share is at most the mean.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from math import log

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError

__all__ = ["Balance", "Floats", "LoadBoard"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_IDS = 1 << 14  # instance ids are below that (kvpool.types)
_ROOM = 16


@dataclass(frozen=True)
class Balance:
    """When an instance has enough.

    Attributes:
        cap: Times the mean load; at least 1. Infinite switches the cap off.
        slack: Work above that which is always granted, in prompts of the size that is to be placed: without it a fleet
            without work could place nothing.
        idle: Utilisation below which an instance that prefills may always get more: keeping prompts together costs
            nobody anything there.
        half_life_s: After which work that is done counts half.
        warmup_s: How long after joining an instance has less than its share.
        warmup_floor: The share that it begins with.
    """

    cap: float = 2.0
    slack: float = 1.0
    idle: float = 0.2
    half_life_s: float = 30.0
    warmup_s: float = 60.0
    warmup_floor: float = 0.1

    def __post_init__(self) -> None:
        if not self.cap >= 1 or self.slack < 0 or not self.half_life_s > 0 or self.warmup_s < 0:
            raise ArgumentError(f"cap at least 1, slack and warmup_s at least 0, half_life_s above 0: {self}")
        if not 0 < self.warmup_floor <= 1 or not 0 <= self.idle <= 1:
            raise ArgumentError(f"warmup_floor above 0 and idle at least 0, both at most 1: {self}")


class LoadBoard:
    """The instances of one role. A slot is an instance's place in the arrays; it changes when another one leaves.

    Args:
        balance: When an instance has enough.
        drains: Whether work is seconds that pass by themselves: then the first request of a queue counts only for what
            is left of it.
    """

    def __init__(self, balance: Balance, drains: bool) -> None:
        self.balance = balance
        self._drains = drains
        # An instance that is busy for the share u of its time has a load of u * half_life / ln 2.
        self._idle_load = balance.idle * balance.half_life_s / log(2) if drains else 0.0
        self._slot_of = np.full(_IDS, -1, dtype=np.int64)
        self._queues: list[deque[tuple[int, float]]] = []  # of (number, work), in the order of arrival
        self._numbers = count()
        self._faded_at = 0.0
        self._closed = 0
        self._warm_at = float("-inf")  # from then on everybody has a full share
        self._equal = True  # capacities
        self._ids = np.empty(_ROOM, dtype=np.int64)
        self._open = np.empty(_ROOM, dtype=np.bool_)
        self._model = np.empty(_ROOM, dtype=np.int64)
        # capacity, joined, unfinished, head's work, since when it runs, done lately
        self._columns = np.empty((6, _ROOM))

    def __len__(self) -> int:
        return len(self._queues)

    # ---- who is there

    def add(self, instance: int, now: float, capacity: float = 1.0, model: int = 0) -> None:
        """An instance joins. Raises ArgumentError when it is there already, or is no id."""
        if not 0 <= instance < _IDS:
            raise ArgumentError(f"instance is {instance}; it must be from 0 to {_IDS - 1}")
        if self._slot_of[instance] >= 0:
            raise ArgumentError(f"instance {instance} is there already")
        if not capacity > 0:
            raise ArgumentError(f"capacity is {capacity}; it must be above 0")
        slot = len(self)
        if slot == len(self._ids):
            self._grow()
        self._ids[slot], self._open[slot], self._model[slot] = instance, True, model
        self._columns[:, slot] = capacity, now, 0.0, 0.0, 0.0, 0.0
        self._slot_of[instance] = slot
        self._queues.append(deque())
        self._warm_at = max(self._warm_at, now + self.balance.warmup_s)
        self._equal = self._equal and capacity == 1.0

    def remove(self, instance: int) -> None:
        """An instance leaves, with all its work. The last one takes its slot."""
        self.set_open(instance, True)  # for the count of closed ones
        slot, last = self.slot(instance), len(self) - 1
        self._slot_of[self._ids[last]] = slot
        self._slot_of[instance] = -1
        for array in (self._ids, self._open, self._model):
            array[slot] = array[last]
        self._columns[:, slot] = self._columns[:, last]
        self._queues[slot] = self._queues[last]
        self._queues.pop()

    def set_open(self, instance: int, is_open: bool) -> None:
        """Whether it gets new work at all."""
        slot = self.slot(instance)
        self._closed += int(self._open[slot]) - int(is_open)
        self._open[slot] = is_open

    def slot(self, instance: int) -> int:
        """Raises ArgumentError for an instance that is not there."""
        slot = int(self._slot_of[instance]) if 0 <= instance < _IDS else -1
        if slot < 0:
            raise ArgumentError(f"instance {instance} is not there")
        return slot

    def slots(self, instances: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots of many; -1 for those that are not there. REQUIRES: ids below 2^14."""
        return self._slot_of[instances]

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Instances by slot; a view."""
        return self._ids[: len(self)]

    @property
    def models(self) -> npt.NDArray[np.int64]:
        """What `add` was given, by slot; a view."""
        return self._model[: len(self)]

    @property
    def is_open(self) -> Bools:
        """Whether each gets new work, by slot; a view."""
        return self._open[: len(self)]

    # ---- their work

    def assign(self, slot: int, work: float, now: float) -> int:
        """Gives an instance work. Returns a number that `finish` takes."""
        number = next(self._numbers)
        queue = self._queues[slot]
        if not queue:
            self._columns[3, slot], self._columns[4, slot] = work, now
        queue.append((number, work))
        self._columns[2, slot] += work
        return number

    def finish(self, instance: int, number: int, now: float, done: bool = True) -> None:
        """The work is done, or (done = False) will not be. Nothing happens when the instance left meanwhile."""
        slot = int(self._slot_of[instance])
        if slot < 0:
            return
        queue = self._queues[slot]
        at = next((at for at, (other, _) in enumerate(queue) if other == number), None)
        if at is None:
            return
        _, work = queue[at]
        del queue[at]
        unfinished = self._columns[2]
        unfinished[slot] = max(0.0, unfinished[slot] - work) if queue else 0.0  # no dust of rounding
        if at == 0:
            self._columns[3, slot], self._columns[4, slot] = (queue[0][1], now) if queue else (0.0, 0.0)
        if done:
            self._fade(now)
            self._columns[5, slot] += work

    def backlog(self, now: float) -> Floats:
        """Work before each instance is free, by slot."""
        unfinished, head, since = self._columns[2:5, : len(self)]
        if not self._drains:
            waiting: Floats = unfinished.copy()
        else:
            waiting = unfinished - np.minimum(now - since, head)
        return waiting

    def load(self, now: float) -> Floats:
        """Unfinished work and what was done lately, for each unit of share; by slot."""
        self._fade(now)
        columns = self._columns[:, : len(self)]
        load: Floats = columns[2] + columns[5]
        share = self._share(now)
        return load if share is None else load / share

    def may_get_more(self, load: Floats, now: float, work: float) -> Bools:
        """Which instances may get work of this size; at least one, where any is open."""
        may = self.is_open
        if self.balance.cap == float("inf") or self._closed == len(self):
            return may
        share = self._share(now)
        if self._closed:
            load_open, share = load[may], None if share is None else share[may]
        else:
            load_open = load
        if share is None:
            mean = float(load_open.sum()) / len(load_open)
        else:
            mean = float(load_open @ share) / float(share.sum())
        # The least is at most the mean; rounding must not lock everybody out.
        limit = max(self.balance.cap * mean, float(load_open.min()), self._idle_load) + self.balance.slack * work
        below: Bools = load <= limit
        return below & may if self._closed else below

    # ---- inside

    def _share(self, now: float) -> Floats | None:
        """None where all have 1, which is nearly always."""
        warm = now >= self._warm_at
        if warm and self._equal:
            return None
        capacity, joined = self._columns[0, : len(self)], self._columns[1, : len(self)]
        if warm:
            share: Floats = capacity / capacity.max()
            return share
        ramp = np.clip((now - joined) / self.balance.warmup_s, self.balance.warmup_floor, 1.0)
        share = capacity * ramp
        share /= share.max()
        return share

    def _fade(self, now: float) -> None:
        passed = now - self._faded_at
        if passed > 0:
            self._columns[5, : len(self)] *= 0.5 ** (passed / self.balance.half_life_s)
            self._faded_at = now

    def _grow(self) -> None:
        self._ids, self._open, self._model = (
            np.concatenate([old, np.empty_like(old)]) for old in (self._ids, self._open, self._model)
        )
        self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
