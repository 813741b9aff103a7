"""What the policies alone predict of a run of examples/migration: the same planner, instances that are only counted.

Time goes in epochs. Moves and placements are done within the epoch of their plan, an instance serves so many seconds
after it was asked for, and what outgrows an instance waits for another place, newest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.policy import mell
from kvpool.policy.rebalancing import InstanceState, Planner, PlanNumber, RunningRequest, WaitingRequest

__all__ = ["Predicted", "predict", "room_of"]


class Arriving(Protocol):
    """An arrival of examples/migration."""

    @property
    def name(self) -> str: ...

    @property
    def at_s(self) -> float: ...

    @property
    def prompt(self) -> tuple[int, ...]: ...

    @property
    def new_tokens(self) -> int: ...


@dataclass(frozen=True)
class Predicted:
    """What a policy takes.

    Attributes:
        seconds: Until the last request has ended.
        instance_seconds: Of all instances.
        instances_max: At once.
        moves: Of requests.
        preempted: Requests that had to wait for another place.
        bound_seconds: No placement of what runs takes fewer instance-seconds.
        token_seconds: Of the room of what runs.
        over_time: Seconds and instances, each epoch.
    """

    seconds: float
    instance_seconds: float
    instances_max: int
    moves: int
    preempted: int
    bound_seconds: float
    token_seconds: float
    over_time: tuple[tuple[float, int], ...]


def room_of(tokens: float, block_tokens: int) -> int:
    """The tokens of the blocks that a request of so many has, with its next one."""
    return -(-int(tokens + 1) // block_tokens) * block_tokens


@dataclass
class _Instance:
    serves_at: float
    running: dict[str, float] = field(default_factory=dict)  # tokens, oldest first
    waiting: dict[str, float] = field(default_factory=dict)
    idle: int = 0


def predict(
    arrivals: Iterable[Arriving],
    planner: Planner,
    *,
    blocks: int,
    block_tokens: int,
    step_s: float,
    epoch_s: float,
    growth: int,
    start_s: float,
) -> Predicted:
    """Runs all requests to their end."""
    coming = sorted(arrivals, key=lambda each: each.at_s)
    ends = {each.name: len(each.prompt) + each.new_tokens for each in coming}
    live = {1: _Instance(0.0)}
    number, epoch, moves, preempted, most = 1, 0, 0, 0, 1
    used = bound = held = 0.0
    over_time = []
    capacity = blocks * block_tokens

    def room(tokens: float) -> int:
        return room_of(tokens, block_tokens)

    while coming or any(one.running or one.waiting for one in live.values()):
        now = epoch * epoch_s
        epoch += 1
        serving = {instance: one for instance, one in live.items() if one.serves_at <= now}
        first = next(iter(serving.values()))
        while coming and coming[0].at_s <= now:
            one = coming.pop(0)
            first.waiting[one.name] = float(len(one.prompt))
        states = []
        for instance, each in serving.items():
            for name in each.running:
                each.running[name] += epoch_s / step_s
            each.running = {name: tokens for name, tokens in each.running.items() if tokens < ends[name]}
            while sum(map(room, each.running.values())) > capacity:
                name = next(reversed(each.running))
                each.waiting[name] = each.running.pop(name)
                preempted += 1
            each.idle = 0 if each.running or each.waiting else each.idle + 1
            states.append(
                InstanceState(
                    instance, capacity,
                    tuple(RunningRequest(name, room(tokens)) for name, tokens in each.running.items()),
                    tuple(WaitingRequest(name, room(tokens)) for name, tokens in each.waiting.items()),
                    growth, last=PlanNumber(1, epoch), idle=each.idle,
                )
            )  # fmt: skip
        plan = planner.plan(states, PlanNumber(1, epoch), min(serving))
        for move in plan.moves:
            live[move.destination].running[move.request] = live[move.source].running.pop(move.request)
            moves += 1
        for place in plan.placed:
            live[place.destination].running[place.request] = live[place.holder].waiting.pop(place.request)
        for instance in plan.ends:
            del live[instance]
        starting = len(live) - len(serving) + len(plan.ends)
        for _ in range(min(plan.starts - starting, planner.instances_max - len(live))):
            number += 1
            live[number] = _Instance(now + start_s)
        sizes = [room(tokens) for one in live.values() for tokens in one.running.values()]
        used += len(live) * epoch_s
        bound += mell.lower_bound(sizes, capacity) * epoch_s
        held += sum(sizes) * epoch_s
        over_time.append((now, len(live)))
        most = max(most, len(live))
    return Predicted(epoch * epoch_s, used, most, moves, preempted, bound, held, tuple(over_time))
