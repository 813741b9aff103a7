"""One plan for all instances, a function of what they say and of nothing else.

So every instance that has the same states makes the same plan, and one that takes over needs nothing of the one before
it: the scheduler adopts what runs (`Mell.adopt`), plans growth and arrivals, and what it would place elsewhere moves.
What this loses against a scheduler that remembers: moves that wait have no order from epoch to epoch. They are planned
again, from what is by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvpool.errors import ArgumentError
from kvpool.policy.mell import Backlog, Boundaries, Move, RequestId, Way
from kvpool.policy.rebalancing.picture import Picture, lagging_instances, picture_of
from kvpool.policy.rebalancing.plan import EpochPlan, Placement, PlannedMove, PlanNumber
from kvpool.policy.rebalancing.schedulers import SCHEDULERS, Scheduler
from kvpool.policy.rebalancing.states import InstanceState, WaitingRequest

__all__ = ["UNBOUNDED", "Planner"]

# Nothing was measured: every move goes by its KV cache, at once.
UNBOUNDED = Boundaries(links=lambda source, destination: (), link_tokens={}, compute={})


@dataclass(frozen=True)
class Planner:
    """How to plan. All instances of a cluster have an equal one.

    Attributes:
        scheduler: Makes one for instances of so many tokens.
        instances_min: So many run always.
        instances_max: No more run.
        boundaries: What migration may use among these instances. None: no bound is known, and all moves go by KV.
        moves_max: Moves in one plan. 0: none, and an instance that overflows has to stop requests.
        idle_epochs: An instance that was without work for so long ends.
        behind_max: An instance that has accepted none of so many plans is left alone.

    Raises:
        ArgumentError: A value out of range.
    """

    scheduler: Callable[[int], Scheduler] = SCHEDULERS["mell"]
    instances_min: int = 1
    instances_max: int = 8
    boundaries: Callable[[Sequence[int]], Boundaries] | None = None
    moves_max: int = 64
    idle_epochs: int = 2
    behind_max: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.instances_min <= self.instances_max or self.behind_max < 1 or self.moves_max < 0:
            raise ArgumentError(
                f"from {self.instances_min} to {self.instances_max} instances, {self.behind_max} "
                f"epochs behind: 1 or more each, the first not above the second; {self.moves_max} moves: 0 or more"
            )
        if self.idle_epochs < 0:
            raise ArgumentError(f"idle_epochs is {self.idle_epochs}; it must be 0 or more")

    def plan(self, states: Sequence[InstanceState], number: PlanNumber, planner: int) -> EpochPlan:
        """The plan for an epoch.

        Args:
            states: What each live instance said last, in any order; one for each.
            number: Of the plan.
            planner: Who makes it. Instances that have not its capacity are left alone.

        Raises:
            ArgumentError: The planner is not among them, or an instance is there twice.
        """
        states = sorted(states, key=lambda state: state.instance)
        own = [state for state in states if state.instance == planner]
        if len(own) != 1 or len({state.instance for state in states}) < len(states):
            raise ArgumentError(f"instance {planner} plans for {[state.instance for state in states]}")
        picture = picture_of(states, own[0].capacity, lagging_instances(states, number.epoch, self.behind_max))
        waiting = self._waiting(states, picture)
        scheduler = self._scheduled(picture, waiting)
        room = {instance: picture.free(instance) for instance in picture.usable}
        places = _Places(scheduler, picture, room, len(states) < self.instances_max)
        placed = self._placed(places, waiting)
        wanted = self._wanted(places)
        moves, deferred = self._divided(wanted, picture, room)
        new = len(scheduler.gpus) - len(places.used)
        starts = max(min(new, self.instances_max - len(states)), self.instances_min - len(picture.usable), 0)
        busy = {move.destination for move in moves} | {place.destination for place in placed} | places.used
        ends = self._ends(states, picture, busy, may_shrink=not starts)
        return EpochPlan(number, planner, moves, placed, starts, ends, deferred).within()

    def _waiting(self, states: Sequence[InstanceState], picture: Picture) -> dict[str, tuple[int, WaitingRequest]]:
        """New requests with their holders. One that runs already, or is longer than an instance, is not among them."""
        running = {row.name for state in states for row in state.running}
        found: dict[str, tuple[int, WaitingRequest]] = {}
        for state in states:
            if state.instance in picture.usable or state.instance in picture.leaving:
                for each in state.waiting:
                    if each.name not in running and each.tokens <= picture.capacity:
                        found.setdefault(each.name, (state.instance, each))
        return found

    def _scheduled(self, picture: Picture, waiting: Mapping[str, tuple[int, WaitingRequest]]) -> Scheduler:
        """A scheduler that has adopted what runs, and has planned the epoch. GPU i is the i-th usable instance."""
        scheduler = self.scheduler(picture.capacity)
        scheduler.adopt({index: picture.places[instance] for index, instance in enumerate(picture.usable)})
        growths: list[tuple[RequestId, int]] = []
        for instance in picture.usable:
            growth = picture.growth[instance]
            for request, tokens in picture.places[instance].items():
                if growth and not (isinstance(request, tuple) and request[0] == "rest"):
                    growths.append((request, min(picture.capacity, tokens + growth)))
        arrivals: list[tuple[RequestId, int]] = [
            (request, tokens) for instance in picture.leaving for request, tokens in picture.places[instance].items()
            if isinstance(request, str)
        ]  # fmt: skip
        arrivals += [(name, each.tokens) for name, (_, each) in waiting.items()]
        scheduler.batch((), growths, arrivals)
        scheduler.tidy()
        return scheduler

    def _placed(self, places: _Places, waiting: Mapping[str, tuple[int, WaitingRequest]]) -> tuple[Placement, ...]:
        """New requests whose place is there and has room: the others wait. Takes their room."""
        found = []
        for name, (holder, each) in waiting.items():
            there = places.of(name, each.tokens)
            if there is not None and places.room[there] >= each.tokens:
                places.room[there] -= each.tokens
                found.append(Placement(name, holder, there))
        return tuple(found)

    def _wanted(self, places: _Places) -> list[tuple[Move, bool]]:
        """The moves that lead to what the scheduler has planned, the most urgent first; and whether it can be made.

        First what leaves an instance that drains or that has not enough room; then what empties an instance.
        """
        found = []
        picture = places.picture
        for instance in [*picture.leaving, *picture.usable]:
            urgent = instance in picture.leaving or picture.free(instance) < 0
            urgency = 0 if urgent else 2 if instance in places.used else 1
            for request, tokens in picture.places[instance].items():
                if not isinstance(request, str) or picture.movable.get(request) != instance:
                    continue
                there = places.of(request, tokens + picture.growth[instance], urgent=urgent)
                if there != instance:
                    move = Move((request,), instance, instance if there is None else there, tokens)
                    found.append((urgency, instance, request, move, there is not None))
        return [(move, can) for _, _, _, move, can in sorted(found, key=lambda each: each[:3])]

    def _divided(
        self, wanted: Sequence[tuple[Move, bool]], picture: Picture, room: dict[int, int]
    ) -> tuple[tuple[PlannedMove, ...], int]:
        """The moves that this epoch has room for, each with its way; and how many wait."""
        moves, left = [], dict(room)
        for move, can in wanted:
            tokens = move.tokens + picture.growth.get(move.destination, 0)
            if can and left[move.destination] >= tokens:
                left[move.destination] -= tokens
                moves.append(move)
        sizes: dict[RequestId, int] = {request: move.tokens for move in moves for request in move.requests}
        division = Backlog().divide(moves, self._boundaries(picture), picture.batches, sizes, room)
        ways = dict.fromkeys(division.made, Way.KV) | dict.fromkeys(division.as_tokens, Way.TOKENS)
        # What is too large for any epoch goes when nothing else has taken the boundary: it lasts for several.
        ways |= {part.move: part.way for part in division.parts if part.move not in ways}
        made = [
            PlannedMove(
                str(move.requests[0]), move.source, move.destination, move.tokens,
                "kv" if ways[move] is Way.KV else "tokens",
            )
            for move in moves
            if move in ways
        ][: self.moves_max]  # fmt: skip
        return tuple(made), len(wanted) - len(made)

    def _boundaries(self, picture: Picture) -> Boundaries:
        """What is left beside the moves that are under way."""
        if self.boundaries is None:
            return UNBOUNDED
        found = self.boundaries(picture.usable + picture.leaving)
        left = dict(found.link_tokens)
        for source, destination, tokens in picture.under_way:
            for link in set(found.links(source, destination)):
                left[link] = max(0, left.get(link, 0) - tokens)
        return replace(found, link_tokens=left)

    def _ends(
        self, states: Sequence[InstanceState], picture: Picture, busy: set[int], may_shrink: bool
    ) -> tuple[int, ...]:
        """Instances that are drained, or have had nothing to do for long enough; those with the highest ids first."""
        found = []
        left = len(picture.usable) if may_shrink else 0
        for state in reversed(states):
            instance = state.instance
            has_any = state.running or state.waiting or state.rest or state.arriving
            idle = not (has_any or instance in picture.arriving | busy)
            if instance in picture.leaving and idle:
                found.append(instance)
            elif instance in picture.usable and idle and state.idle >= self.idle_epochs and left > self.instances_min:
                found.append(instance)
                left -= 1
        return tuple(sorted(found))


class _Places:
    """Where a scheduler has placed requests, by instances.

    Attributes:
        picture: Of all instances.
        used: Instances that have something, as it has planned.
        room: Tokens free at each usable instance.
    """

    def __init__(self, scheduler: Scheduler, picture: Picture, room: dict[int, int], may_start: bool) -> None:
        self.picture = picture
        self.room = room
        self.used = {picture.usable[number] for number in scheduler.gpus if number < len(picture.usable)}
        self._scheduler = scheduler
        self._may_start = may_start

    def of(self, request: RequestId, tokens: int, urgent: bool = True) -> int | None:
        """Its instance; None: one that has still to start.

        Where no more may start, that is the instance with the least sufficient room, if it is urgent.
        """
        number = self._scheduler.where(request)
        if number < len(self.picture.usable):
            return self.picture.usable[number]
        if self._may_start or not urgent:
            return None
        able = [instance for instance, free in self.room.items() if free >= tokens]
        return min(able, key=lambda instance: (self.room[instance], instance), default=None)
