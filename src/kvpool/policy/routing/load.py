"""How much work each instance has, and which may get more.

Work is in seconds for instances that prefill, in tokens for those that decode. An instance's *load* is its unfinished
work plus its recently finished work, which decays with a half-life: so a load cap binds not only when queues have
grown.

    may get more:  load / share <= max(cap * sum of loads / sum of shares, what an idle one does) + slack

`share` is the instance's capacity relative to the largest; it is smaller while the instance is new. The least loaded
instance always may, because its load / share is at most the mean.

All of it is available for one instance, for some, or for all as arrays. The sums over all instances are kept up to
date, and `order` has the least loaded first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from math import inf, log

import numpy as np
import numpy.typing as npt

from kvpool.policy.routing.balance import Balance
from kvpool.policy.routing.fading import Fading
from kvpool.policy.routing.instance_slots import Bools, Floats, InstanceSlots
from kvpool.policy.routing.order import LoadOrder, Work

__all__ = ["Bools", "Floats", "LoadTable"]

_SUMMED = 1 << 16  # changes after which sums are recomputed: each change rounds
_AWAY = 0.25  # of a half-life: who was away for less has missed little


class LoadTable(InstanceSlots):
    """The instances of one role. A slot is an instance's index in the arrays; it changes when another instance leaves.

    Args:
        balance: When an instance has enough.
        drains: Whether work is in seconds, which pass by themselves: then only the rest of a queue's first request
            counts.

    Attributes:
        order: The open instances that have a full share, least loaded first; `refresh` brings it up to date.
        newcomers: Slots of instances that do not have a full share yet, closed ones included.
        idle: Slots of open instances that have nothing to do, newcomers included.
    """

    def __init__(self, balance: Balance, drains: bool) -> None:
        super().__init__()
        self.balance = balance
        self.order = LoadOrder()
        self.newcomers: set[int] = set()
        self.idle: set[int] = set()
        self._drains = drains
        # An instance that is busy for the share u of its time has a load of u * half_life / ln 2.
        self._idle_load = balance.idle * balance.half_life_s / log(2) if drains else 0.0
        self._numbers = count()
        self._fading = Fading(balance.half_life_s)  # of finished work
        self._closed = 0
        self._closed_at: dict[int, float] = {}  # by instance
        self._warm_at = inf  # when the next newcomer gets a full share
        self._most = 0.0  # the largest capacity of the instances with a full share
        self._equal = True  # capacities
        self._sums = [0.0, 0.0, 0.0]  # unfinished, done, capacity, of those that are open; capacity without newcomers
        self._changes = 0  # since the sums were made
        self._moved: set[int] = set()  # slots whose position in the order has changed

    # ---- instances

    def add(self, instance: int, now: float, capacity: float = 1.0, model: int = 0) -> None:
        """An instance joins.

        Raises:
            ArgumentError: It is there already, or is no id, or its capacity is out of range.
            ArgumentTypeError: Its capacity is no number.
        """
        slot = self._enter(instance, model, capacity, now)
        self._equal = self._equal and capacity == 1.0
        self.newcomers.add(slot)
        self.idle.add(slot)
        self._warm_at = min(self._warm_at, now + self.balance.warmup_s)
        self.refresh(now)

    def remove(self, instance: int) -> None:
        """An instance leaves, with all its work. The last one takes its slot."""
        slot, last = self.slot(instance), len(self) - 1
        self._closed -= not self._open[slot]
        self._closed_at.pop(instance, None)
        moved = last in self.order or last in self._moved
        self._moved -= {slot, last}
        self.order.drop(slot)
        self.order.drop(last)
        self._leave(slot)
        self.newcomers.discard(slot)
        if last in self.newcomers:
            self.newcomers.remove(last)
            self.newcomers.add(slot)
        self.idle -= {slot, last}
        if slot != last:
            self._note_idle(slot)
        if moved and slot != last:
            self._put(slot, float(self._since[slot]))
        self._sum()

    def set_open(self, instance: int, is_open: bool, now: float) -> None:
        """Whether it gets new work at all. One that does again after long counts as if it had worked as the others."""
        slot = self.slot(instance)
        if bool(self._open[slot]) == is_open:
            return
        self._closed += 1 if not is_open else -1
        self._open[slot] = is_open
        self._note_idle(slot)
        closed_at = self._closed_at.pop(instance, now)
        if not is_open:
            self._closed_at[instance] = now
            self.order.drop(slot)
            self._moved.discard(slot)
        elif slot not in self.newcomers:
            if now - closed_at >= _AWAY * self.balance.half_life_s:
                self._catch_up({slot})
            self._put(slot, float(self._since[slot]))
        self._sum()

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
        self._rebase_if_due(now)  # which recomputes the sums: before anything in them changes
        _, work = queue[at]
        del queue[at]
        before = self._unfinished.item(slot)
        # No rounding error when one request is left: nothing waits behind it, and that is the same value for all.
        after = max(0.0, before - work) if len(queue) > 1 else queue[0][1] if queue else 0.0
        self._unfinished[slot] = after
        if at == 0:
            self._head[slot], self._since[slot] = (queue[0][1], now) if queue else (0.0, 0.0)
        grown = 0.0
        if done:
            grown = work / self._fading.left(now)
            self._done[slot] += grown
        self._changed(slot, after - before, grown, now)

    # ---- of one instance

    def backlog_of(self, slot: int, now: float) -> float:
        """As `backlog`."""
        unfinished: float = self._unfinished.item(slot)
        return unfinished - min(now - self._since.item(slot), self._head.item(slot)) if self._drains else unfinished

    def load_of(self, slot: int, now: float) -> float:
        """As `load`."""
        load: float = self._unfinished.item(slot) + self._done.item(slot) * self._fading.left(now)
        if self._equal and not self.newcomers:
            return load
        return load / self._share_of(slot, now)

    def figures(self, slots: Iterable[int], now: float) -> list[tuple[float, float, int]]:
        """(load, backlog, slot) of those that are open, as load_of and backlog_of; quicker for several."""
        unfinished, done, since, head = self._unfinished.item, self._done.item, self._since.item, self._head.item
        is_open, drains, faded = self._open.item, self._drains, self._fading.left(now)
        alike = self._equal and not self.newcomers
        found = []
        for slot in slots:
            if not is_open(slot):
                continue
            work = backlog = unfinished(slot)
            load = work + done(slot) * faded
            if not alike:
                load /= self._share_of(slot, now)
            if drains:
                passed, first = now - since(slot), head(slot)
                backlog = work - (passed if passed < first else first)
            found.append((load, backlog, slot))
        return found

    def ranked(self, slots: Iterable[int], now: float) -> list[tuple[float, int]]:
        """(load, instance) of some, in that order; quicker than as arrays for few."""
        if not self._equal or self.newcomers:
            return sorted([(self.load_of(slot, now), self.id_of(slot)) for slot in slots])
        unfinished, done, ids = self._unfinished.item, self._done.item, self._ids.item
        faded = self._fading.left(now)
        return sorted([(unfinished(slot) + done(slot) * faded, ids(slot)) for slot in slots])

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
        mean = (unfinished + done * self._fading.left(now)) / (capacity / self._largest(now))
        return max(self.balance.cap * mean, self._idle_load) + self.balance.slack * work

    def faded(self, now: float) -> float:
        """The factor by which finished work in `order` has decayed, with all capacities at their full value."""
        return self._fading.left(now) * self.largest(now)

    def largest(self, now: float) -> float:
        """The capacity that is a share of 1."""
        return 1.0 if self._equal and not self.newcomers else self._largest(now)

    def advance(self, now: float) -> None:
        """Accounts for the time that has passed: newcomers may get a full share, and decayed sums are rebased."""
        if now >= self._warm_at:
            self._graduate(now)
        self._rebase_if_due(now)

    def refresh(self, now: float) -> None:
        """Brings `order` up to date."""
        self.advance(now)
        for slot in self._moved:
            self._put(slot, now)
        self._moved.clear()
        for slot in self.order.overdue(now):
            self._put(slot, now)

    def enter_anew(self, slots: Iterable[int]) -> None:
        """Has the next `refresh` enter these slots into `order` again. REQUIRES: they are in it."""
        self._moved.update(slots)

    # ---- of all

    def backlog(self, now: float, slots: npt.NDArray[np.int64] | None = None) -> Floats:
        """Work before each instance is free, by slot, of all or of some."""
        some = slice(len(self)) if slots is None else slots
        unfinished, head, since = self._unfinished[some], self._head[some], self._since[some]
        waiting: Floats = unfinished - np.minimum(now - since, head) if self._drains else unfinished.copy()
        return waiting

    def load(self, now: float, slots: npt.NDArray[np.int64] | None = None) -> Floats:
        """Unfinished and recently finished work, per unit of share; by slot, of all or of some."""
        some = slice(len(self)) if slots is None else slots
        load: Floats = self._unfinished[some] + self._done[some] * self._fading.left(now)
        if self._equal and not self.newcomers:
            return load
        share = self._share(now)
        return load / (share if slots is None else share[slots])

    def is_idle(self) -> Bools:
        """As the attribute `idle`, by slot."""
        nothing: Bools = self._unfinished[: len(self)] == 0.0
        return nothing & self.is_open

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

    def _note_idle(self, slot: int) -> None:
        if self._open.item(slot) and self._unfinished.item(slot) == 0.0:
            self.idle.add(slot)
        else:
            self.idle.discard(slot)

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
        """The capacity of a newcomer."""
        age = (now - self._joined.item(slot)) / self.balance.warmup_s if self.balance.warmup_s else 1.0
        return float(self._capacity.item(slot) * min(1.0, max(self.balance.warmup_floor, age)))

    def _largest(self, now: float) -> float:
        most = self._most
        for slot in self.newcomers:
            most = max(most, self._capacity_of(slot, now))
        return most

    def _rebase_if_due(self, now: float) -> None:
        """Counts finished work as of now, when it is due."""
        if not self._fading.is_due(now):
            return
        factor = self._fading.move_on(now)
        self._done[: len(self)] *= factor
        self.order.scale(factor)
        self._sum()

    def _graduate(self, now: float) -> None:
        """Gives newcomers that have been present for `warmup_s` a full share."""
        warm_at = {slot: self._joined.item(slot) + self.balance.warmup_s for slot in self.newcomers}
        self.newcomers = {slot for slot, since in warm_at.items() if now < since}
        self._warm_at = min((warm_at[slot] for slot in self.newcomers), default=inf)
        warm = {slot for slot in warm_at.keys() - self.newcomers if self._open[slot]}
        if self.balance.warmup_s:
            self._catch_up(warm)
        for slot in warm:
            self._put(slot, now)
        self._sum()

    def _catch_up(self, slots: set[int]) -> None:
        """Counts at least the median of the others' finished work as that of instances that have (again) a full share.

        Without it they lower the mean, so the load cap forbids all others until they have done as much: requests queue
        at them while others are free. REQUIRES: the caller enters them into the order and sums.
        """
        size = len(self)
        others = self._open[:size].copy()
        others[[*self.newcomers, *slots]] = False
        done = self._done[:size][others] / self._capacity[:size][others]
        if done.size:
            middle = (done.size - 1) // 2
            usual = float(np.partition(done, middle)[middle])  # of one of them: a mean would be rounded
            for slot in slots:
                self._done[slot] = max(self._done.item(slot), usual * self._capacity.item(slot))

    def _put(self, slot: int, now: float) -> None:
        work = None
        if self._queues[slot]:
            head = self._head.item(slot) if self._drains else 0.0
            work = Work(self._unfinished.item(slot), head, self._since.item(slot))
        faded = self._fading.left_lately(now)
        self.order.put(slot, work, self._done.item(slot), self._capacity.item(slot), now, faded)

    def _changed(self, slot: int, unfinished: float, done: float, now: float) -> None:
        """Adds to the unfinished and the finished work; `done` in the units of `_done`."""
        self._note_idle(slot)
        if self._open[slot]:
            self._sums[0] += unfinished
            self._sums[1] += done
            if slot not in self.newcomers:
                self._moved.add(slot)
        self._changes += 1
        if self._changes >= _SUMMED:
            self._sum()

    def _sum(self) -> None:
        """Computes the sums again from the arrays."""
        size = len(self)
        has_full_share = np.ones(size, dtype=np.bool_)
        has_full_share[list(self.newcomers)] = False
        opened, capacity = self._open[:size], self._capacity[:size]
        self._most = float(capacity[has_full_share].max(initial=0.0))
        self._sums = [
            float(self._unfinished[:size][opened].sum()),
            float(self._done[:size][opened].sum()),
            float(capacity[opened & has_full_share].sum()),
        ]
        self._changes = 0
