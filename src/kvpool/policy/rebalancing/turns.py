"""Who plans, which plans count, and what each instance does of one.

The live instance with the lowest id plans. An instance listens only to the one that it takes for the planner, and only
to a plan with a higher number than any that it has accepted, and not below any that another says it has: so it carries
out each plan at most once, none of an old epoch, and none of a planner that another one has replaced. Two planners may
exist while instances disagree on who is alive; each request is moved by its source alone, so the worst is a move that
another plan would not have made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final

from kvpool.policy.rebalancing.plan import NO_PLAN, EpochPlan, Placement, PlannedMove, PlanNumber
from kvpool.policy.rebalancing.states import InstanceState

__all__ = ["Duties", "PlanBook", "duties_of", "planner_of"]

_AHEAD_MAX: Final = 1 << 40  # more plans than an instance can miss: 30,000 years of epochs of a second
_INSTANCES: Final = 1 << 14  # ids are below; a term leaves its planner's id when it is divided by this


def planner_of(instances: Iterable[int]) -> int | None:
    """Who plans among these live instances: the lowest id. None: there is no instance."""
    return min(instances, default=None)


class PlanBook:
    """The plans that one instance has made and accepted. Not thread-safe.

    Attributes:
        accepted: The number of the latest plan that it has accepted.

    Args:
        instance: Its id.
    """

    def __init__(self, instance: int) -> None:
        """An instance that knows of no plan."""
        self.accepted = NO_PLAN
        self._instance = instance
        self._made = NO_PLAN

    def accept(self, plan: EpochPlan, planner: int | None, others: Iterable[InstanceState] = ()) -> bool:
        """Whether a plan is to be carried out here: at most once, and never one that is older than another.

        Args:
            plan: As it was published.
            planner: Whom this instance takes for the planner.
            others: What the others say: one that was stopped may have missed the plan that replaced this one.
        """
        if plan.planner != planner or plan.number <= self.accepted:
            return False
        if any(plan.number < state.last for state in others):
            return False
        self.accepted = plan.number
        return True

    def next_number(self, states: Iterable[InstanceState]) -> PlanNumber:
        """The number of the next plan that this instance makes: higher than any that an instance has accepted.

        A new term begins where another instance has planned since this one did. No two instances ever have the same
        term: two that take over at once, neither of which has heard of the other, make plans of different numbers.
        """
        known = [state.last for state in states] + [self.accepted, self._made]
        term = max(number.term for number in known)
        epoch = max(number.epoch for number in known) + 1
        if not self._made.term or term > self._made.term:
            term += 1 + (self._instance - term - 1) % _INSTANCES
        return PlanNumber(term, epoch)

    def strange(self, known: Mapping[int, PlanNumber]) -> set[int]:
        """Instances whose numbers cannot be: far beyond all that this one knows of, and most others do.

        If one of them counted, numbers would soon end, and with them all plans.

        Args:
            known: The highest number that each of the others names.
        """
        found: set[int] = set()
        for part in range(2):
            own = max(self.accepted[part], self._made[part])
            named = sorted([own, *(number[part] for number in known.values())])
            limit = max(own, named[(len(named) - 1) // 2]) + _AHEAD_MAX
            found |= {instance for instance, number in known.items() if number[part] > limit}
        return found

    def made(self, number: PlanNumber) -> None:
        """Notes that this instance has published a plan of this number."""
        self._made = max(self._made, number)


@dataclass(frozen=True)
class Duties:
    """What one instance does of a plan.

    Attributes:
        moves: That it carries out, as their source, in this order.
        placed: New requests that it sends to their place, as their holder.
        void: Its moves and placements that cannot be: what they name has ended or left, or the other is gone.
        ends: Whether it is to end.
    """

    moves: tuple[PlannedMove, ...] = ()
    placed: tuple[Placement, ...] = ()
    void: int = 0
    ends: bool = False


def duties_of(
    plan: EpochPlan, instance: int, movable: Set[str], waiting: Set[str], live: Set[int], busy: bool
) -> Duties:
    """What an instance does of a plan that it has accepted.

    Args:
        plan: The plan.
        instance: Whose part.
        movable: Its requests that are free to move.
        waiting: New requests that it holds.
        live: Instances that requests can go to, this one included.
        busy: Whether it has anything to do, or something is on its way to it: then it does not end.
    """
    mine = [move for move in plan.moves if move.source == instance]
    held = [place for place in plan.placed if place.holder == instance]
    moves = tuple(move for move in mine if move.request in movable and move.destination in live)
    placed = tuple(place for place in held if place.request in waiting and place.destination in live)
    void = len(mine) - len(moves) + len(held) - len(placed)
    return Duties(moves, placed, void, instance in plan.ends and not busy)
