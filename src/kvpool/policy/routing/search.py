"""The instance that a policy would choose of all, found by looking at few.

An instance is chosen by its backlog, its load, and how much it holds of the prompt. So

  - of those that hold some of it, each is looked at: as arrays where they are many;
  - of those that hold nothing, only the least loaded that the load cap allows is in question. The board's order is
    followed until what comes then cannot be better than the best one so far.

What is found is what the policy would find in a view of all instances: the same figures are compared in the same way.
Where the order does not lead there soon (much was done lately where little waits, so that the load cap forbids many in
a row), nothing is found, and all instances have to be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvpool.policy.routing.candidates import FEW, Candidates
from kvpool.policy.routing.load import LoadBoard
from kvpool.policy.routing.policies import TOLERANCE, Ranking, first_of
from kvpool.policy.routing.tree import Ints

__all__ = ["find_best"]

_STEPS: Final = 64  # looking at so many takes as long as looking at a few thousand as arrays
_FEW_ALIKE: Final = 8  # are looked at one by one
_NEAR: Final = 1e-14  # of a time or a load: what two ways to compute it differ by is less


def find_best(
    policy: Ranking,
    board: LoadBoard,
    found: Candidates,
    exec_s: Sequence[Sequence[float]],
    now: float,
    work: float,
) -> int | None:
    """The slot that the policy ranks first.

    Args:
        policy: Ranks the instances.
        board: Where they stand.
        found: Who holds how much.
        exec_s: What the prompt takes, for each model and for each of `found.lengths`.
        now: Seconds.
        work: What the prompt takes at most, for the load cap.

    Returns:
        None where it was not found, or no instance takes it.
    """
    board.settle(now)
    if len(board.newcomers) > FEW:
        return None
    search = _Search(policy, board, found, exec_s, now, board.limit(now, work))
    search.look_at_holders()
    if search.done:
        return search.slot
    board.refresh(now)
    return search.slot if search.follow_idle() and search.follow_busy() and search.slot >= 0 else None


class _Search:
    """One decision. `slot` is the best one so far, or -1."""

    def __init__(
        self,
        policy: Ranking,
        board: LoadBoard,
        found: Candidates,
        exec_s: Sequence[Sequence[float]],
        now: float,
        limit: float,
    ) -> None:
        self.slot = -1
        self._policy, self._board, self._found = policy, board, found
        self._exec_s, self._now, self._limit = exec_s, now, limit
        self._best: tuple[Any, ...] = ()
        self._none = len(found.lengths) - 1  # the place in `lengths` of those that hold nothing
        self._least_s = min(times[-1] for times in exec_s)  # that it takes one of them
        self._left = _STEPS

    @property
    def done(self) -> bool:
        """Whether none of those that hold nothing can come before the best one so far, however little they do."""
        return self._hopeless(0.0, 0.0)

    def look_at_holders(self) -> None:
        """All of them, and all newcomers: these stand in no order."""
        found, bounds = self._found, self._found.bounds
        for at in range(self._none):
            slots = found.slots[bounds[at] : bounds[at + 1]]
            if len(slots) > _FEW_ALIKE:
                self._consider_many(np.asarray(slots), at)
            else:
                for slot in slots:
                    self._consider(int(slot), at)
        for slot in self._board.newcomers:
            self._consider(slot, found.at(slot))

    def follow_idle(self) -> bool:
        """Those that have nothing to do: the first that may get more is the best of a model. False to give up."""
        board, found = self._board, self._found
        faded = board.faded(self._now)
        models: set[int] = set()
        for done, slot in board.order.idle:
            load = done * faded
            if load * (1 - _NEAR) > self._limit or self._hopeless(0.0, load, slot < self.slot):
                break
            self._left -= 1
            if self._left < 0:
                return False
            if found.at(slot) == self._none and self._consider(slot, self._none):
                models.add(board.model_of(slot))
                if len(models) == len(self._exec_s):
                    break
        return True

    def follow_busy(self) -> bool:
        """The others, both orders of them. False to give up."""
        order, now = self._board.order, self._now
        for free_at, slot in order.running:
            if self._hopeless(free_at - now - _NEAR * abs(free_at), 0.0):
                break
            self._left -= 1
            if self._left < 0:
                return False
            if self._found.at(slot) == self._none:
                self._consider(slot, self._none)
        # Many may wait equally long, nothing at all where the last request takes longer than predicted, and their order
        # is then a bound only.
        waiting = order.waiting
        first, end = 0, len(waiting)
        while first < end:
            middle = (first + end) // 2
            if self._hopeless(waiting[middle][0], 0.0):  # not by load, which is in no order where backlogs are dust
                end = middle
            else:
                first = middle + 1
        if end:
            self._consider_many(self._found.without(slot for _, _, slot in waiting[:end]), self._none)
        return True

    # ---- inside

    def _consider_many(self, slots: Ints, at: int) -> None:
        """Looks at the least loaded of those that hold equally much and may get more, of each model."""
        board, now = self._board, self._now
        load = board.load(now, slots)
        allowed = (load <= self._limit) & board.is_open[slots]
        for model in range(len(self._exec_s)):
            left = (allowed & (board.models[slots] == model) if len(self._exec_s) > 1 else allowed).nonzero()[0]
            if len(left):
                exec_s = self._exec_s[model][at]
                ranks = self._policy.rank(board.backlog(now, slots[left]), load[left], self._found.lengths[at], exec_s)
                self._consider(int(slots[left][first_of(ranks, len(left))].min()), at)

    def _consider(self, slot: int, at: int) -> bool:
        """Looks at one; whether it may get more."""
        board, now = self._board, self._now
        load = board.load_of(slot, now)
        if load > self._limit or not board.is_open_at(slot):
            return False
        exec_s = self._exec_s[board.model_of(slot) if len(self._exec_s) > 1 else 0][at]
        rank = self._policy.rank(board.backlog_of(slot, now), load, self._found.lengths[at], exec_s)
        if self.slot < 0 or _before(rank, self._best, slot < self.slot):
            self._best, self.slot = rank, slot
        return True

    def _hopeless(self, backlog: float, load: float, where_equal: bool = True) -> bool:
        """Whether who holds nothing and has at least so much to do cannot come before the best one so far."""
        if self.slot < 0:
            return False
        rank = self._policy.rank(backlog, load, 0, self._least_s)
        return not _before(rank, self._best, where_equal)


def _before(rank: tuple[Any, ...], other: tuple[Any, ...], where_equal: bool) -> bool:
    """Whether a rank comes before another one; figures that differ by rounding are equal, but for the last."""
    for mine, theirs in zip(rank[:-1], other[:-1], strict=True):
        if abs(mine - theirs) > TOLERANCE * abs(theirs if theirs < mine else mine):
            return bool(mine < theirs)
    mine, theirs = rank[-1], other[-1]
    return bool(mine < theirs or (where_equal and mine == theirs))
