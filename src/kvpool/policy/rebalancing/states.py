"""What an instance says of itself in each epoch, and its form in the record of the cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvpool.errors import ArgumentError
from kvpool.policy.rebalancing.fields import UNREADABLE, count_in, name_in, number_in
from kvpool.policy.rebalancing.plan import NO_PLAN, PlanNumber

__all__ = ["STATE_BYTES_MAX", "InstanceState", "RunningRequest", "WaitingRequest", "state_from", "state_json"]

STATE_BYTES_MAX: Final = 40 << 10  # of JSON: about 1,000 requests with names of 25 bytes
_VERSION: Final = 1
_PINNED: Final = -1


class RunningRequest(NamedTuple):
    """A request that an instance decodes.

    Attributes:
        name: The same at every instance.
        tokens: The room that it takes now.
        free: Whether it may move.
        to: The instance that it is on its way to; 0: none.
    """

    name: str
    tokens: int
    free: bool = True
    to: int = 0


class WaitingRequest(NamedTuple):
    """A new request that waits for a place, and the room that it needs at first."""

    name: str
    tokens: int


@dataclass(frozen=True)
class InstanceState:
    """One instance, as it last said.

    Attributes:
        instance: Its id in the cluster.
        capacity: Tokens that its requests have room for.
        running: Its requests, oldest first.
        waiting: New requests that it holds, and that the next plan places somewhere, oldest first.
        growth: Tokens by which each request grows until the next plan is carried out.
        rest: Tokens of further requests, which it does not name: they stay where they are.
        last: The latest plan that it has accepted.
        idle: For how many epochs it has had nothing to do.
        draining: It takes nothing more, and its requests leave.
        arriving: Requests that are on their way to it, or whose source does not know yet that they have come.
    """

    instance: int
    capacity: int
    running: tuple[RunningRequest, ...] = ()
    waiting: tuple[WaitingRequest, ...] = ()
    growth: int = 0
    rest: int = 0
    last: PlanNumber = NO_PLAN
    idle: int = 0
    draining: bool = False
    arriving: int = 0


def state_json(state: InstanceState, bytes_max: int = STATE_BYTES_MAX) -> dict[str, Any]:
    """What an instance publishes, in so many bytes of JSON.

    Where there are too many requests, those with fewest tokens are not named, but counted as `rest`; those on their way
    are always named first. New requests that do not fit wait unseen until others have been placed.
    """
    fields: dict[str, Any] = {
        "v": _VERSION,
        "c": state.capacity,
        "g": state.growth,
        "s": state.rest,
        "n": list(state.last),
        "i": state.idle,
        "d": int(state.draining),
        "a": state.arriving,
    }
    left = bytes_max - len(json.dumps(fields, separators=(",", ":"))) - 32
    rows = [_row(each) for each in state.running]
    costs = [len(json.dumps(row, separators=(",", ":"))) + 1 for row in rows]
    named = set(range(len(rows)))
    if sum(costs) > left * 3 // 4:
        named.clear()
        room = left * 3 // 4
        for at in sorted(range(len(rows)), key=lambda at: (not state.running[at].to, -rows[at][1], at)):
            if costs[at] <= room:
                room -= costs[at]
                named.add(at)
        fields["s"] += sum(rows[at][1] for at in range(len(rows)) if at not in named)
    left -= sum(costs[at] for at in named)
    waiting = []
    for each in state.waiting:
        left -= len(json.dumps(list(each), separators=(",", ":"))) + 1
        if left < 0:
            break
        waiting.append(list(each))
    return fields | {"r": [rows[at] for at in sorted(named)], "w": waiting}


def state_from(fields: Mapping[str, Any], instance: int) -> InstanceState | None:
    """The state that an instance publishes; None if this version cannot read it.

    Raises:
        ArgumentError: It is nothing that an instance can say.
    """
    try:
        if fields["v"] != _VERSION:
            return None
        running = tuple(_running(row) for row in fields["r"])
        waiting = tuple(WaitingRequest(name_in(name), _size(tokens)) for name, tokens in fields["w"])
        if len({each.name for each in running}) < len(running) or len({one.name for one in waiting}) < len(waiting):
            raise ValueError("a request is named twice")
        term, epoch = fields["n"]
        return InstanceState(
            instance,
            _size(fields["c"]),
            running,
            waiting,
            count_in(fields["g"]),
            count_in(fields["s"]),
            PlanNumber(number_in(term), number_in(epoch)),
            count_in(fields["i"]),
            bool(count_in(fields["d"])),
            count_in(fields.get("a", 0)),  # earlier releases do not say it
        )
    except UNREADABLE as error:
        raise ArgumentError(f"instance {instance} publishes a state that cannot be: {error!r}") from None


def _row(each: RunningRequest) -> list[Any]:
    if each.to:
        return [each.name, each.tokens, each.to]
    return [each.name, each.tokens] if each.free else [each.name, each.tokens, _PINNED]


def _running(row: Any) -> RunningRequest:
    name, tokens, *more = row
    if len(more) > 1:
        raise ValueError(f"{row!r} has {len(row)} fields")
    if not more:
        return RunningRequest(name_in(name), _size(tokens))
    pinned = more[0] == _PINNED
    return RunningRequest(name_in(name), _size(tokens), False, 0 if pinned else _size(more[0]))


def _size(value: object) -> int:
    found = count_in(value)
    if not found:
        raise ValueError("0 where there must be more")
    return found
