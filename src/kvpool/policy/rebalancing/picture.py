"""What runs where, by what all instances say: their word counts, and none of it has to be of the same moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.policy.mell import RequestId
from kvpool.policy.rebalancing.states import InstanceState, RunningRequest

__all__ = ["Picture", "lagging_instances", "picture_of"]


@dataclass
class Picture:
    """All instances of one cluster.

    A request stands at one instance here, also while it is on its way: at its destination. It takes room at both.

    Attributes:
        capacity: Tokens of each instance.
        usable: Instances that requests may go to, ascending.
        leaving: Instances whose requests leave: they drain.
        places: What stands at each instance, oldest first, with its tokens now. What is not named, and what several
            instances claim, stands there under a tuple instead of its name.
        movable: The instance of each request that may move.
        taken: Tokens in use at each instance at the end of the epoch, of requests on their way too.
        arriving: Instances that something is on its way to.
        under_way: Source, destination and tokens of what is on its way.
        growth: Tokens by which each request grows, by its instance.
        batches: Requests of each instance.
    """

    capacity: int
    usable: list[int]
    leaving: list[int]
    places: dict[int, dict[RequestId, int]] = field(default_factory=dict)
    movable: dict[str, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    arriving: set[int] = field(default_factory=set)
    under_way: list[tuple[int, int, int]] = field(default_factory=list)
    growth: dict[int, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)

    def free(self, instance: int) -> int:
        """Tokens that an instance has room for beyond what it has, and what comes to it."""
        return self.capacity - self.taken.get(instance, 0)


def picture_of(states: Sequence[InstanceState], capacity: int, lagging: frozenset[int]) -> Picture:
    """The picture that these states give.

    Args:
        states: Of all instances, ascending. One of another capacity is left alone.
        capacity: Tokens of each instance.
        lagging: Instances that do not follow the plans: nothing goes there, nothing is to leave.
    """
    alike = [state for state in states if state.capacity == capacity]
    usable = [state.instance for state in alike if not state.draining and state.instance not in lagging]
    leaving = [state.instance for state in alike if state.draining and state.instance not in lagging]
    found = Picture(capacity, usable, leaving)
    for state in alike:
        found.places[state.instance] = {}
        found.growth[state.instance] = state.growth
        found.batches[state.instance] = len(state.running)
        found.taken[state.instance] = state.rest
        _stand_rest(found, state)
    claims: dict[str, list[tuple[int, RunningRequest]]] = {}
    for state in alike:
        for row in state.running:
            claims.setdefault(row.name, []).append((state.instance, row))
            found.taken[state.instance] += row.tokens + state.growth
    for name, claim in claims.items():
        _stand(found, name, claim)
    return found


def _stand_rest(found: Picture, state: InstanceState) -> None:
    """What is not named takes its room, in items that a scheduler counts as small."""
    piece = max(1, found.capacity // 8)
    places = found.places[state.instance]
    left = min(state.rest, found.capacity)
    while left > 0:
        places[("rest", state.instance, len(places))] = min(piece, left)
        left -= piece


def _stand(found: Picture, name: str, claim: list[tuple[int, RunningRequest]]) -> None:
    leaves = [(at, row) for at, row in claim if row.to]
    stays = [(at, row) for at, row in claim if not row.to]
    if len(stays) == 1:  # the others are its source, which does not know yet that it has arrived
        at, row = stays[0]
        found.places[at][name] = min(row.tokens, found.capacity)
        if row.free and not leaves:
            found.movable[name] = at
    elif not stays and len(leaves) == 1:
        at, row = leaves[0]
        goes = row.to if row.to in found.usable else at
        found.places[goes][name] = min(row.tokens, found.capacity)
        found.arriving.add(row.to)  # also where it drains, and the request may come to nothing
        if goes == row.to:
            found.under_way.append((at, goes, row.tokens))
            found.taken[goes] = found.taken.get(goes, 0) + row.tokens + found.growth.get(goes, 0)
    else:  # the states are of different moments, or wrong: it counts wherever it is claimed, and stays
        for at, row in claim:
            found.places[at][("claimed", name, at)] = min(row.tokens, found.capacity)


def lagging_instances(states: Iterable[InstanceState], epoch: int, behind_max: int) -> frozenset[int]:
    """Instances that have accepted a plan once, and none of the last `behind_max`."""
    return frozenset(state.instance for state in states if state.last.epoch and epoch - state.last.epoch > behind_max)
