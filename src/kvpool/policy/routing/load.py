"""How much work each instance has, and which may get more.

Work is in seconds for instances that prefill, in tokens for those that decode. An instance's *load* is what it has not
finished, and what it finished lately, which fades with a half-life: so a load cap binds not only when queues have
grown.

    may get more:  load / share <= max(cap * sum of loads / sum of shares, what an idle one does) + slack

`share` is the instance's capacity relative to the largest, and less while it is newer than others. The least loaded
instance always may, for its load / share is at most the mean.

All of it can be asked for one instance, for some, or for all as arrays; the sums over all are kept, and `order` has the
least loaded at hand.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from math import inf, ldexp, log

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.policy.routing.balance import Balance
from kvpool.policy.routing.order import LoadOrder, Work

__all__ = ["Bools", "Floats", "LoadBoard"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_IDS = 1 << 14  # instance ids are below that (kvpool.types)
_ROOM = 16
_SUMMED = 1 << 16  # changes after which sums are made anew: each rounds
_HALVINGS = 64  # work that is done is counted as it was so many half-lives ago at most


class LoadBoard:
    """The instances of one role. A slot is an instance's place in the arrays; it changes when another one leaves.

    Args:
        balance: When an instance has enough.
        drains: Whether work is seconds that pass by themselves: then the first request of a queue counts only for what
            is left of it.

    Attributes:
        order: Who is least loaded, but for newcomers and those that are closed; `refresh` brings it up to date.
        newcomers: Slots of those that have less than a full share yet, closed ones too.
    """

    def __init__(self, balance: Balance, drains: bool) -> None:
        self.balance = balance
        self.order = LoadOrder()
        self.newcomers: set[int] = set()
        self._drains = drains
        # An instance that is busy for the share u of its time has a load of u * half_life / ln 2.
        self._idle_load = balance.idle * balance.half_life_s / log(2) if drains else 0.0
        self._slot_of = np.full(_IDS, -1, dtype=np.int64)
        self._queues: list[deque[tuple[int, float]]] = []  # of (number, work), in the order of arrival
        self._numbers = count()
        self._then = 0.0  # `done` is as it was at this time, so nothing has to be done for it to fade
        self._closed = 0
        self._warm_at = inf  # when the next newcomer is none any more
        self._most = 0.0  # the largest capacity of those that are no newcomers
        self._equal = True  # capacities
        self._sums = [0.0, 0.0, 0.0]  # unfinished, done, capacity, of those that are open; capacity without newcomers
        self._changes = 0  # since the sums were made
        self._fading = 0.0, 1.0  # a time, and what is left then of what `done` counts
        self._moved: set[int] = set()  # slots whose place in the order has changed
        self._ids = np.empty(_ROOM, dtype=np.int64)
        self._open = np.empty(_ROOM, dtype=np.bool_)
        self._model = np.empty(_ROOM, dtype=np.int64)
        self._columns = np.empty((6, _ROOM))
        self._name_columns()

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
        self._equal = self._equal and capacity == 1.0
        self.newcomers.add(slot)
        self._warm_at = min(self._warm_at, now + self.balance.warmup_s)
        self.refresh(now)

    def remove(self, instance: int) -> None:
        """An instance leaves, with all its work. The last one takes its slot."""
        slot, last = self.slot(instance), len(self) - 1
        self._closed -= not self._open[slot]
        moved = last in self.order or last in self._moved
        self._moved -= {slot, last}
        self.order.drop(slot)
        self.order.drop(last)
        self._slot_of[self._ids[last]] = slot
        self._slot_of[instance] = -1
        for array in (self._ids, self._open, self._model):
            array[slot] = array[last]
        self._columns[:, slot] = self._columns[:, last]
        self._queues[slot] = self._queues[last]
        self._queues.pop()
        self.newcomers.discard(slot)
        if last in self.newcomers:
            self.newcomers.remove(last)
            self.newcomers.add(slot)
        if moved and slot != last:
            self._put(slot, float(self._since[slot]))
        self._sum()

    def set_open(self, instance: int, is_open: bool) -> None:
        """Whether it gets new work at all."""
        slot = self.slot(instance)
        if bool(self._open[slot]) == is_open:
            return
        self._closed += 1 if not is_open else -1
        self._open[slot] = is_open
        if not is_open:
            self.order.drop(slot)
            self._moved.discard(slot)
        elif slot not in self.newcomers:
            self._put(slot, float(self._since[slot]))
        self._sum()

    def slot(self, instance: int) -> int:
        """Raises ArgumentError for an instance that is not there."""
        slot: int = self._slot_of.item(instance) if 0 <= instance < _IDS else -1
        if slot < 0:
            raise ArgumentError(f"instance {instance} is not there")
        return slot

    def slots(self, instances: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots of many; -1 for those that are not there. REQUIRES: ids below 2^14."""
        return self._slot_of[instances]

    def id_of(self, slot: int) -> int:
        """The instance."""
        return int(self._ids.item(slot))

    def is_open_at(self, slot: int) -> bool:
        """Whether it gets new work."""
        return bool(self._open.item(slot))

    def has_open(self, instance: int) -> bool:
        """Whether an instance is there and gets new work. REQUIRES: an id below 2^14."""
        slot: int = self._slot_of.item(instance)
        return slot >= 0 and bool(self._open[slot])

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

    @property
    def closed(self) -> int:
        """How many get no new work."""
        return self._closed

    # ---- their work

    def assign(self, slot: int, work: float, now: float) -> int:
        """Gives an instance work. Returns a number that `finish` takes."""
        number = next(self._numbers)
        queue = self._queues[slot]
        if not queue:
            self._head[slot], self._since[slot] = work, now
        queue.append((number, work))
        self._unfinished[slot] += work
        self._changed(slot, work, 0.0, now)
        return number

    def finish(self, instance: int, number: int, now: float, done: bool = True) -> None:
        """The work is done, or (done = False) will not be. Nothing happens when the instance left meanwhile."""
        slot: int = self._slot_of.item(instance)
        if slot < 0:
            return
        queue = self._queues[slot]
        at = next((at for at, (other, _) in enumerate(queue) if other == number), None)
        if at is None:
            return
        self._rebase_if_due(now)  # which makes the sums anew: before anything of it changes
        _, work = queue[at]
        del queue[at]
        before = self._unfinished.item(slot)
        after = max(0.0, before - work) if queue else 0.0  # no dust of rounding
        self._unfinished[slot] = after
        if at == 0:
            self._head[slot], self._since[slot] = (queue[0][1], now) if queue else (0.0, 0.0)
        grown = 0.0
        if done:
            grown = work / self._faded(now)
            self._done[slot] += grown
        self._changed(slot, after - before, grown, now)

    # ---- of one instance

    def backlog_of(self, slot: int, now: float) -> float:
        """As `backlog`."""
        unfinished: float = self._unfinished.item(slot)
        return unfinished - min(now - self._since.item(slot), self._head.item(slot)) if self._drains else unfinished

    def load_of(self, slot: int, now: float) -> float:
        """As `load`."""
        load: float = self._unfinished.item(slot) + self._done.item(slot) * self._faded(now)
        if self._equal and not self.newcomers:
            return load
        return load / self._share_of(slot, now)

    def model_of(self, slot: int) -> int:
        """What `add` was given."""
        return int(self._model.item(slot))

    def limit(self, now: float, work: float) -> float:
        """The load up to which an instance may get work of this size, but for rounding as `may_get_more` says."""
        if self.balance.cap == inf:
            return inf
        unfinished, done, capacity = self._sums
        capacity += sum(self._capacity_of(slot, now) for slot in self.newcomers if self._open[slot])
        if not capacity:
            return 0.0
        mean = (unfinished + done * self._faded(now)) / (capacity / self._largest(now))
        return max(self.balance.cap * mean, self._idle_load) + self.balance.slack * work

    def faded(self, now: float) -> float:
        """What work that was done counts of what `order` has of it, where all capacities count in full."""
        return self._faded(now) * self.largest(now)

    def largest(self, now: float) -> float:
        """The capacity that is a share of 1."""
        return 1.0 if self._equal and not self.newcomers else self._largest(now)

    def settle(self, now: float) -> None:
        """Time has passed: who was a newcomer may be none any more."""
        if now >= self._warm_at:
            self._settle(now)
        self._rebase_if_due(now)

    def refresh(self, now: float) -> None:
        """Brings `order` up to date."""
        self.settle(now)
        for slot in self._moved:
            self._put(slot, now)
        self._moved.clear()
        for slot in self.order.overdue(now):
            self._put(slot, now)

    # ---- of all

    def backlog(self, now: float, slots: npt.NDArray[np.int64] | None = None) -> Floats:
        """Work before each instance is free, by slot, of all or of some."""
        some = slice(len(self)) if slots is None else slots
        unfinished, head, since = self._unfinished[some], self._head[some], self._since[some]
        waiting: Floats = unfinished - np.minimum(now - since, head) if self._drains else unfinished.copy()
        return waiting

    def load(self, now: float, slots: npt.NDArray[np.int64] | None = None) -> Floats:
        """Unfinished work and what was done lately, for each unit of share; by slot, of all or of some."""
        some = slice(len(self)) if slots is None else slots
        load: Floats = self._unfinished[some] + self._done[some] * self._faded(now)
        if self._equal and not self.newcomers:
            return load
        share = self._share(now)
        return load / (share if slots is None else share[slots])

    def may_get_more(self, load: Floats, now: float, work: float) -> Bools:
        """Which instances may get work of this size; at least one, where any is open."""
        may = self.is_open
        if self.balance.cap == inf or self._closed == len(self):
            return may
        share = None if self._equal and not self.newcomers else self._share(now)
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

    def _share(self, now: float) -> Floats:
        capacity, joined = self._columns[0, : len(self)], self._columns[1, : len(self)]
        if not self.newcomers:
            share: Floats = capacity / capacity.max()
            return share
        with np.errstate(divide="ignore", invalid="ignore"):
            age = (now - joined) / self.balance.warmup_s
        share = capacity * np.clip(np.nan_to_num(age, nan=1.0), self.balance.warmup_floor, 1.0)
        share /= share.max()
        return share

    def _share_of(self, slot: int, now: float) -> float:
        capacity = self._capacity_of(slot, now) if slot in self.newcomers else self._capacity.item(slot)
        return capacity / self._largest(now)

    def _capacity_of(self, slot: int, now: float) -> float:
        """Of a newcomer."""
        age = (now - self._joined.item(slot)) / self.balance.warmup_s if self.balance.warmup_s else 1.0
        return float(self._capacity.item(slot) * min(1.0, max(self.balance.warmup_floor, age)))

    def _largest(self, now: float) -> float:
        most = self._most
        for slot in self.newcomers:
            most = max(most, self._capacity_of(slot, now))
        return most

    def _faded(self, now: float) -> float:
        """What is left of work that was done when `_done` was as it is."""
        if now != self._fading[0]:
            self._fading = now, 0.5 ** (max(0.0, now - self._then) / self.balance.half_life_s)
        return self._fading[1]

    def _rebase_if_due(self, now: float) -> None:
        """Counts work that was done as it is now, by a power of two: so nothing is rounded."""
        if now - self._then <= _HALVINGS * self.balance.half_life_s:
            return
        half_life_s = self.balance.half_life_s
        factor = ldexp(1.0, -int(min((now - self._then) // half_life_s, 1e4)))
        self._then = now - (now - self._then) % half_life_s
        self._fading = -inf, 0.0  # no longer
        self._done[: len(self)] *= factor
        self.order.scale(factor)
        self._sum()

    def _settle(self, now: float) -> None:
        """Newcomers that have been there long enough are none any more."""
        warm_at = {slot: self._joined.item(slot) + self.balance.warmup_s for slot in self.newcomers}
        self.newcomers = {slot for slot, since in warm_at.items() if now < since}
        self._warm_at = min((warm_at[slot] for slot in self.newcomers), default=inf)
        for slot in warm_at.keys() - self.newcomers:
            if self._open[slot]:
                self._put(slot, now)
        self._sum()

    def _put(self, slot: int, now: float) -> None:
        work = None
        if self._queues[slot]:
            head = self._head.item(slot) if self._drains else 0.0
            work = Work(self._unfinished.item(slot), head, self._since.item(slot))
        self.order.put(slot, work, self._done.item(slot), self._capacity.item(slot), now)

    def _changed(self, slot: int, unfinished: float, done: float, now: float) -> None:
        """So much more is unfinished and done, counted as `_done` is."""
        if self._open[slot]:
            self._sums[0] += unfinished
            self._sums[1] += done
            if slot not in self.newcomers:
                self._moved.add(slot)
        self._changes += 1
        if self._changes >= _SUMMED:
            self._sum()

    def _sum(self) -> None:
        """Makes the sums anew."""
        size = len(self)
        settled = np.ones(size, dtype=np.bool_)
        settled[list(self.newcomers)] = False
        opened, capacity = self._open[:size], self._capacity[:size]
        self._most = float(capacity[settled].max(initial=0.0))
        self._sums = [
            float(self._unfinished[:size][opened].sum()),
            float(self._done[:size][opened].sum()),
            float(capacity[opened & settled].sum()),
        ]
        self._changes = 0

    def _grow(self) -> None:
        self._ids, self._open, self._model = (
            np.concatenate([old, np.empty_like(old)]) for old in (self._ids, self._open, self._model)
        )
        self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        self._name_columns()

    def _name_columns(self) -> None:
        self._capacity, self._joined, self._unfinished, self._head, self._since, self._done = self._columns
