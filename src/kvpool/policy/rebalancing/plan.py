"""The plan of an epoch: made by one instance for all, and carried out at most once by each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kvpool.errors import ArgumentError
from kvpool.policy.rebalancing.fields import UNREADABLE, count_in, name_in, number_in

__all__ = ["NO_PLAN", "PLAN_BYTES_MAX", "EpochPlan", "Placement", "PlanNumber", "PlannedMove", "plan_from", "plan_json"]

PLAN_BYTES_MAX: Final = 12 << 10  # of JSON: a record of the cluster has 64 KiB for everything
_VERSION: Final = 1
_WAYS: Final = ("kv", "tokens")


class PlanNumber(NamedTuple):
    """Orders all plans of a cluster. Compared by term, then by epoch.

    Attributes:
        term: Grows when another instance begins to plan, so that a plan of the one before is older. Each has its own.
        epoch: Grows with every plan, over all terms.
    """

    term: int = 0
    epoch: int = 0


NO_PLAN: Final = PlanNumber()  # older than every plan


class PlannedMove(NamedTuple):
    """One request goes to another instance, by its KV cache or by its tokens."""

    request: str
    source: int
    destination: int
    tokens: int
    way: Literal["kv", "tokens"]


class Placement(NamedTuple):
    """A new request, which waits at `holder`, begins at `destination`, which may be the same."""

    request: str
    holder: int
    destination: int


_Row = TypeVar("_Row", PlannedMove, Placement, int)


@dataclass(frozen=True)
class EpochPlan:
    """What the instances do in one epoch.

    Each move and each placement has room at its destination without any other one of the plan, so each instance carries
    its own ones out without waiting for others.

    Attributes:
        number: Of this plan.
        planner: The instance that made it.
        moves: The first are the most urgent.
        placed: New requests that begin.
        starts: So many more instances are needed than are members now.
        ends: Instances that have nothing, and are to end.
        deferred: Moves that are wanted, and not in this plan: no boundary or no destination has room for them yet.
    """

    number: PlanNumber
    planner: int
    moves: tuple[PlannedMove, ...] = ()
    placed: tuple[Placement, ...] = ()
    starts: int = 0
    ends: tuple[int, ...] = ()
    deferred: int = 0

    def asks_the_same(self, other: EpochPlan) -> bool:
        """Whether it differs from another plan in its number only, and nothing in it is to be done again.

        What was accepted may not have been done: a move has failed, or an instance had got something and did not end.
        """
        mine = (self.planner, self.moves, self.placed, self.starts, self.ends, self.deferred)
        theirs = (other.planner, other.moves, other.placed, other.starts, other.ends, other.deferred)
        return mine == theirs and not (self.moves or self.placed or self.ends)

    def within(self, bytes_max: int = PLAN_BYTES_MAX) -> EpochPlan:
        """The same plan with as many of its moves, placements and ends as fit into so many bytes: the others wait.

        Ends have an eighth of the room at most. Of the rest moves and placements have half each, and what the other
        leaves.
        """
        if len(json.dumps(plan_json(self), separators=(",", ":"))) <= bytes_max:
            return self
        ends = _first(self.ends, (bytes_max - 256) // 8)
        room = bytes_max - 256 - sum(map(_size, ends))
        # Moves empty what drains or overflows; a long queue is not to keep them waiting, nor they the queue.
        moves = _first(self.moves, max(room // 2, room - sum(map(_size, self.placed))))
        placed = _first(self.placed, room - sum(map(_size, moves)))
        deferred = self.deferred + len(self.moves) - len(moves)
        return EpochPlan(self.number, self.planner, moves, placed, self.starts, ends, deferred)


def _size(row: PlannedMove | Placement | int) -> int:
    return len(json.dumps(row)) + 1


def _first(rows: tuple[_Row, ...], room: int) -> tuple[_Row, ...]:
    """Those that fit, the first ones first."""
    found = []
    for row in rows:
        if _size(row) <= room:
            room -= _size(row)
            found.append(row)
    return tuple(found)


def plan_json(plan: EpochPlan) -> dict[str, Any]:
    """What the planner publishes."""
    return {
        "v": _VERSION,
        "n": list(plan.number),
        "m": [list(move) for move in plan.moves],
        "p": [list(place) for place in plan.placed],
        "s": plan.starts,
        "e": list(plan.ends),
        "d": plan.deferred,
    }


def plan_from(fields: Mapping[str, Any], planner: int) -> EpochPlan | None:
    """The plan that an instance publishes; None if this version cannot read it.

    Raises:
        ArgumentError: It is no plan.
    """
    try:
        if fields["v"] != _VERSION:
            return None
        term, epoch = fields["n"]
        moves = tuple(_move(*each) for each in fields["m"])
        placed = tuple(Placement(name_in(name), _id(holder), _id(at)) for name, holder, at in fields["p"])
        if len({move.request for move in moves}) < len(moves):
            raise ValueError("a request moves twice")
        if len({place.request for place in placed}) < len(placed):
            raise ValueError("a request begins twice")
        return EpochPlan(
            PlanNumber(number_in(term), number_in(epoch)),
            planner,
            moves,
            placed,
            count_in(fields["s"]),
            tuple(_id(each) for each in fields["e"]),
            count_in(fields["d"]),
        )
    except UNREADABLE as error:
        raise ArgumentError(f"instance {planner} publishes a plan that cannot be: {error!r}") from None


def _move(request: object, source: object, destination: object, tokens: object, way: object) -> PlannedMove:
    if way not in _WAYS or source == destination:
        raise ValueError(f"a move by {way!r} from {source!r} to {destination!r}")
    return PlannedMove(
        name_in(request), _id(source), _id(destination), count_in(tokens), "kv" if way == "kv" else "tokens"
    )


def _id(value: object) -> int:
    found = count_in(value)
    if not found:
        raise ValueError("instance 0")
    return found
