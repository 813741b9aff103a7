"""What the members of a cluster say of themselves and plan for all, as they last published it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvpool.cluster import Member
from kvpool.control.migration import MigrationTotals
from kvpool.errors import ArgumentError
from kvpool.policy.rebalancing import EpochPlan, InstanceState, plan_from, plan_json, state_from, state_json
from kvpool.policy.rebalancing.fields import UNREADABLE, count_in

__all__ = ["KnowsMembers", "MemberStates", "MoveCounts", "PublishesState", "Said", "moves_of", "published"]

_log = logging.getLogger("kvpool.rebalancing")


class PublishesState(Protocol):
    """A `Registration`."""

    @property
    def instance(self) -> int:
        """The id of this member."""

    @property
    def name(self) -> str:
        """The name of this member."""

    def lease_valid(self) -> bool:
        """Whether this member is known to be one still."""

    @property
    def leases_lost(self) -> int:
        """How often it was no member for a while."""

    @property
    def closed(self) -> bool:
        """Whether this member has left."""

    def publish(self, *, rebalancing: Mapping[str, Any]) -> None:
        """Publishes soon."""


class KnowsMembers(Protocol):
    """A `Cluster`."""

    @property
    def registration(self) -> PublishesState | None:
        """Of this member."""

    @property
    def lease_s(self) -> float:
        """After so many seconds a silent member is lost."""

    def members(self) -> Sequence[Member]:
        """The live members."""


@dataclass(frozen=True)
class Said:
    """What one member has published.

    Attributes:
        name: The member's.
        state: What it says of itself.
        plan: What it plans for all, if it takes itself for the planner.
        beat: Grows in every epoch in which it has done a planner's part; None: it does not say.
    """

    name: str
    state: InstanceState
    plan: EpochPlan | None
    beat: int | None = None


class MemberStates:
    """Reads the records of members, each only when it has changed. One thread at a time may call."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[Mapping[str, Any], Said | None]] = {}

    def read(self, members: Sequence[Member]) -> dict[int, Said]:
        """What each member says that takes part, by its id. What cannot be read is logged, and left out."""
        found: dict[int, tuple[Mapping[str, Any], Said | None]] = {}
        for member in members:
            before = self._read.get(member.instance)
            fields = member.rebalancing
            if before is not None and before[0] is fields:
                found[member.instance] = before
            else:
                found[member.instance] = fields, _said(member)
        self._read = found
        return {instance: said for instance, (_, said) in found.items() if said is not None}


class MoveCounts(NamedTuple):
    """The migrations of one member, for `kvpool top`.

    Attributes:
        leaving: Requests that are on their way from it now.
        by_kv: That have left it, by their KV cache.
        by_tokens: That have left it, by their tokens.
        failed: That were to leave it, and have stayed.
    """

    leaving: int
    by_kv: int
    by_tokens: int
    failed: int


def published(state: InstanceState, plan: EpochPlan | None, beat: int, totals: MigrationTotals) -> dict[str, Any]:
    """What a member publishes: all at once, so that nobody sees a part of a plan."""
    ok = [totals.left.get((way, "ok"), 0) for way in ("kv", "tokens")]
    fields = {"state": state_json(state), "moved": [*ok, sum(totals.left.values()) - sum(ok)], "beat": beat}
    return fields if plan is None else fields | {"plan": plan_json(plan)}


def moves_of(member: Member) -> MoveCounts | None:
    """What a member says of its migrations; None if it takes no part, or nothing that can be read."""
    said = _said(member)
    try:
        by_kv, by_tokens, failed = member.rebalancing["moved"]
        counts = [count_in(each) for each in (by_kv, by_tokens, failed)]
    except UNREADABLE:
        return None
    return None if said is None else MoveCounts(sum(bool(each.to) for each in said.state.running), *counts)


def _said(member: Member) -> Said | None:
    if not member.rebalancing:
        return None
    try:
        if not isinstance(fields := member.rebalancing.get("state"), Mapping):
            raise ArgumentError(f"instance {member.instance} publishes no state")
        state = state_from(fields, member.instance)
        plan, beat = member.rebalancing.get("plan"), member.rebalancing.get("beat")
        if beat is not None and not isinstance(beat, int):
            raise ArgumentError(f"the beat of instance {member.instance} is {beat!r}")
        return None if state is None else Said(member.name, state, plan and plan_from(plan, member.instance), beat)
    except ArgumentError as error:
        _log.warning("%s", error, extra={"member": member.name, "why": "what it says cannot be read"})
        return None
