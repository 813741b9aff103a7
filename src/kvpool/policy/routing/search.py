"""Finds the choice of a ranking policy by examining few instances.

A policy ranks an instance by its backlog, its load, and how much of the prompt it holds. So

  - of the instances that hold equally much, only the least loaded that the load cap allows can be chosen;
  - if even an idle one of them would not rank before the best one so far, the search skips all of them;
  - if they are few, the search examines each. If they are many (as those that hold nothing), it follows the table's
    order until the next one cannot be better than the best one so far. The holders of a prompt are busy, so the order
    may begin with many others: then the search evaluates all that hold as much, as arrays.

The result is the one that the policy would find in a view of all instances: the same values are compared in the same
way. If the order does not lead to it soon (instances with little backlog and much recent work, which the load cap
forbids, may follow each other), the search finds nothing, and the caller evaluates all instances.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from typing import Any, Final

import numpy as np

from kvpool.policy.routing.candidates import FEW, Candidates, Values
from kvpool.policy.routing.load import LoadTable
from kvpool.policy.routing.policies import TOLERANCE, Ranking, first_of
from kvpool.policy.routing.tree import Ints
from kvpool.policy.routing.waiting import Wait

__all__ = ["find_best"]

_STEPS: Final = 64  # examining this many takes as long as examining a few thousand as arrays
_STEPS_HELD: Final = 6  # and this many, as examining those of a thousand that hold equally much
_FEW_ALIKE: Final = 12  # are looked at one by one
_DENSE: Final = 16  # if one in this many instances qualifies, following the table's order soon finds one
_NEAR: Final = 1e-14  # a part of a time or a load: two ways to compute it differ by less


def find_best(
    policy: Ranking,
    table: LoadTable,
    found: Candidates,
    exec_s: Sequence[Values],
    now: float,
    work: float,
    wait: Wait | None = None,
) -> int | None:
    """The slot that the policy ranks first.

    Args:
        policy: Ranks the instances.
        table: The load table.
        found: How much each instance holds.
        exec_s: The time of the prompt for each model and for each of `found.lengths`.
        now: Seconds.
        work: The longest time of the prompt, for the load cap.
        wait: Bounds the backlog of the chosen instance; None for no bound.

    Returns:
        None if the search did not find it, or no instance takes the request.
    """
    table.advance(now)
    if len(table.newcomers) > FEW:
        return None
    search = _Search(policy, table, found, exec_s, now, table.limit(now, work), wait)
    search.look_at_few()
    if search.goes_on():
        table.refresh(now)
        if not (search.follow_idle() and search.follow_running() and search.follow_waiting()):
            return None
    return search.slot if search.slot >= 0 else None


class _Search:
    """One decision. `slot` is the best one so far, or -1."""

    def __init__(
        self,
        policy: Ranking,
        table: LoadTable,
        found: Candidates,
        exec_s: Sequence[Values],
        now: float,
        limit: float,
        wait: Wait | None,
    ) -> None:
        self.slot = -1
        self._policy, self._table, self._found = policy, table, found
        self._exec_s, self._now, self._limit, self._wait = exec_s, now, limit, wait
        # How long a request may wait depends on what is held, for a policy too that minds only the load.
        self._minds_cached = policy.minds_cached or wait is not None
        self._best: tuple[Any, ...] = ()
        self._none = len(found.lengths) - 1  # the index of length 0 in `lengths`
        self._followed: list[int] = []  # indices of the `lengths` for which the table's order is followed
        self._left = _STEPS
        self._held: dict[int, tuple[int, float]] = {}  # cached tokens, and the least time of the prompt then

    def goes_on(self) -> bool:
        """Whether an instance further in the order may rank before the best one so far."""
        self._followed = [at for at in self._followed if not self._is_hopeless(at, 0.0, 0.0)]
        return bool(self._followed)

    def look_at_few(self) -> None:
        """Considers newcomers, which are in no order, and the holders of each length that few hold."""
        found, size = self._found, len(self._table)
        for at in range(self._none if self._minds_cached else 0):
            if self._is_hopeless(at, 0.0, 0.0):
                continue
            count = found.count(at)
            if count <= _FEW_ALIKE:
                self._consider_few(found.few(at), at)
            elif count * _DENSE < size:
                self._consider_many(found.slots(at), at)
            else:
                self._followed.append(at)
        self._followed.append(self._none)
        for slot in self._table.newcomers:
            self._consider(slot, self._at(slot))

    def follow_idle(self) -> bool:
        """Considers idle instances: the first that may get more is the best of its model. False to give up."""
        table = self._table
        faded = table.faded(self._now)
        found: set[tuple[int, int]] = set()
        for done, slot in table.order.idle:
            load = done * faded
            if load * (1 - _NEAR) > self._limit or self._hopeless(0.0, load, slot < self.slot):
                break
            if not self._step():
                return False
            at = self._at(slot)
            if at in self._followed and self._consider(slot, at):
                found.add((at, self._model_of(slot)))
                if len(found) == len(self._followed) * len(self._exec_s):
                    break
        return True

    def follow_running(self) -> bool:
        """Considers instances whose work ends at a known time. False to give up."""
        for free_at, slot in self._table.order.running:
            backlog = free_at - self._now - _NEAR * abs(free_at)
            if self._waits_too_long(backlog) or self._hopeless(backlog, 0.0):
                break
            if not self._step():
                return False
            at = self._at(slot)
            if at in self._followed:
                self._consider(slot, at)
        return True

    def follow_waiting(self) -> bool:
        """Considers instances whose backlog does not shrink; many may have the same one. False to give up."""
        table, waiting = self._table, self._table.order.waiting
        faded = table.faded(self._now) * (1 - _NEAR)
        position, tried = 0, []
        alike: list[float] = []
        found: set[tuple[int, int]] = set()  # of those that are alike
        while position < len(waiting):
            *figures, slot = waiting[position]
            backlog, least = figures[0], figures[1] * faded
            if self._waits_too_long(backlog) or self._hopeless(backlog, 0.0):
                break
            if least > self._limit or self._hopeless(backlog, least, slot < self.slot):
                position = bisect_left(waiting, (backlog, inf, inf), position)  # of one backlog, loads rise
                continue
            if not self._step():
                break
            position += 1
            at = self._at(slot)
            if at not in self._followed:
                continue
            self._consider(slot, at)
            tried.append(slot)
            if figures != alike:
                alike, found = figures, set()
            found.add((at, self._model_of(slot)))
            if len(found) == len(self._followed) * len(self._exec_s):
                position = bisect_left(waiting, (*figures, inf), position)
        table.enter_anew(tried)
        return self._left >= 0

    # ---- inside

    def _step(self) -> bool:
        """Counts one more examined instance; False to give up."""
        self._left -= 1
        if self._left < _STEPS - _STEPS_HELD and self._followed and self._followed[0] != self._none:
            held = [at for at in self._followed if at != self._none]
            for at in held:
                self._consider_many(self._found.slots(at), at)
            self._followed = self._followed[len(held) :]  # the last one is `_none`, if it is there
        return self._left >= 0

    def _at(self, slot: int) -> int:
        """How much an instance holds, if the policy minds."""
        return self._found.at(slot) if self._minds_cached else self._none

    def _model_of(self, slot: int) -> int:
        """The index of an instance's times; 0 where the times are the same for all models."""
        return self._table.model_of(slot) if len(self._exec_s) > 1 else 0

    def _consider_many(self, slots: Ints, at: int) -> None:
        """Considers, for each model, the least loaded of the instances that hold equally much and may get more."""
        table, now = self._table, self._now
        load = table.load(now, slots)
        allowed = (load <= self._limit) & table.is_open[slots]
        for model in range(len(self._exec_s)):
            left = (allowed & (table.models[slots] == model) if len(self._exec_s) > 1 else allowed).nonzero()[0]
            exec_s = self._exec_s[model][at]
            if self._wait is not None and len(left):
                left = left[self._wait.pays_of(table.backlog(now, slots[left]), np.full(len(left), exec_s))]
            if len(left):
                ranks = self._policy.rank(table.backlog(now, slots[left]), load[left], self._found.lengths[at], exec_s)
                self._consider(int(slots[left][first_of(ranks, len(left))].min()), at)

    def _consider_few(self, slots: list[int], at: int) -> None:
        """Considers instances that hold equally much: only those that none before has less backlog and load than."""
        if len(self._exec_s) > 1 or len(slots) == 1:
            for slot in slots:
                self._consider(slot, at)
            return
        cached, exec_s = self._found.lengths[at], self._exec_s[0][at]
        limit, wait, rank_of = self._limit, self._wait, self._policy.rank
        least_backlog = least_load = inf
        for load, backlog, slot in self._table.figures(slots, self._now):
            if load > limit or (backlog > least_backlog and load > least_load):
                continue
            if wait is not None and not wait.pays(backlog, exec_s):
                continue
            least_backlog, least_load = backlog, load
            rank = rank_of(backlog, load, cached, exec_s)
            if self.slot < 0 or _before(rank, self._best, slot < self.slot):
                self._best, self.slot = rank, slot

    def _consider(self, slot: int, at: int) -> bool:
        """Considers one instance; returns whether it may get more."""
        table, now = self._table, self._now
        load = table.load_of(slot, now)
        if load > self._limit or not table.is_open_at(slot):
            return False
        backlog = table.backlog_of(slot, now)
        exec_s = self._exec_s[self._model_of(slot)][at]
        if self._wait is not None and not self._wait.pays(backlog, exec_s):
            return False
        rank = self._policy.rank(backlog, load, self._found.lengths[at], exec_s)
        if self.slot < 0 or _before(rank, self._best, slot < self.slot):
            self._best, self.slot = rank, slot
        return True

    def _waits_too_long(self, backlog: float) -> bool:
        """Whether no instance with this backlog may get the request, whatever it holds."""
        return self._wait is not None and not self._wait.pays(backlog, 0.0)

    def _hopeless(self, backlog: float, load: float, where_equal: bool = True) -> bool:
        """Whether no instance of the order with at least this backlog can rank before the best one so far."""
        followed = self._followed
        if len(followed) == 1:  # as it mostly is
            return self._is_hopeless(followed[0], backlog, load, where_equal)
        return all(self._is_hopeless(at, backlog, load, where_equal) for at in followed)

    def _is_hopeless(self, at: int, backlog: float, load: float, where_equal: bool = True) -> bool:
        """As `_hopeless`, of the instances that hold this length."""
        if self.slot < 0:
            return False
        held = self._held.get(at)
        if held is None:
            times = self._exec_s
            least_s = times[0][at] if len(times) == 1 else min(each[at] for each in times)
            held = self._held[at] = self._found.lengths[at], least_s
        return not _before(self._policy.rank(backlog, load, *held), self._best, where_equal)


def _before(rank: tuple[Any, ...], other: tuple[Any, ...], where_equal: bool) -> bool:
    """Whether a rank comes before another; figures that differ by rounding are equal, except the last one."""
    last = len(rank) - 1
    for at in range(last):
        mine, theirs = rank[at], other[at]
        if mine != theirs and abs(mine - theirs) > TOLERANCE * abs(theirs if theirs < mine else mine):
            return bool(mine < theirs)
    mine, theirs = rank[last], other[last]
    return bool(mine < theirs or (where_equal and mine == theirs))
