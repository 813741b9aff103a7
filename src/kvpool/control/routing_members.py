"""Members of a cluster as the instances of a global scheduler."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Final

from kvpool.cluster import Cluster, Member, MemberEvent
from kvpool.policy.cost import CostModel
from kvpool.policy.routing import GlobalScheduler, Kind

__all__ = ["KINDS", "RoutingMembers"]

KINDS: Final = {"prefill": Kind.PREFILL, "decode": Kind.DECODE, "both": Kind.COLOCATED}


class RoutingMembers:
    """Keeps a scheduler in step with a cluster. New members get requests gradually, draining members no new ones.

    A newcomer is eased in by the scheduler's `Balance`. A member that is draining, or has no address yet, is known to
    the scheduler, so that its requests end there and others fetch from it, but not chosen. One that was lost is removed
    with all that it was believed to hold; when it comes back, also after a lost lease, it begins from nothing.

    A scheduler belongs to one thread. What the cluster tells waits until that thread calls `apply`: before each
    `route`, or every few milliseconds. Only that thread may call this.

    Args:
        cluster: Whose members.
        scheduler: It has no instances yet, or none of the members' ids.
        by_events: The members' KV events are applied, so that responses teach nothing that lasts.
        capacity: Of a member, relative to the others; 1.0 for all by default.
        model: Predicts the prefills of a member; None, or where it returns None, the scheduler's own.
    """

    def __init__(
        self,
        cluster: Cluster,
        scheduler: GlobalScheduler,
        *,
        by_events: bool = False,
        capacity: Callable[[Member], float] | None = None,
        model: Callable[[Member], CostModel | None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._by_events = by_events
        self._capacity = capacity
        self._model = model
        self._members: dict[str, Member] = {}
        self._events: queue.SimpleQueue[MemberEvent] = queue.SimpleQueue()
        self._watch = cluster.on_change(self._events.put)

    def apply(self) -> list[MemberEvent]:
        """Tells the scheduler what has happened since, and returns it: requests of "lost" and "left" have failed."""
        happened = []
        while not self._events.empty():  # this thread alone takes from it
            event = self._events.get()
            happened.append(event)
            self._apply(event)
        return happened

    def member(self, instance: int) -> Member | None:
        """The member with an instance id that the scheduler has chosen; None when it has gone."""
        return next((one for one in self._members.values() if one.instance == instance), None)

    def close(self) -> None:
        """Ends it. The scheduler keeps the instances that it has. Idempotent."""
        self._watch.close()

    def _apply(self, event: MemberEvent) -> None:
        member = event.member
        before = self._members.get(member.name)
        if event.kind in ("left", "lost"):
            if before is not None and before.incarnation == member.incarnation:
                self._remove(before)
            return
        if before is not None and not before.same_incarnation(member):
            self._remove(before)
            before = None
        if before is None:
            self._add(member)
        if before is None or _takes_requests(before) != _takes_requests(member):
            (self._scheduler.resume if _takes_requests(member) else self._scheduler.drain)(member.instance)
        self._members[member.name] = member

    def _add(self, member: Member) -> None:
        self._scheduler.add_instance(
            member.instance,
            KINDS[member.role],
            by_events=self._by_events,
            capacity=self._capacity(member) if self._capacity else 1.0,
            model=self._model(member) if self._model else None,
        )

    def _remove(self, member: Member) -> None:
        del self._members[member.name]
        self._scheduler.remove_instance(member.instance)


def _takes_requests(member: Member) -> bool:
    return member.state == "up" and bool(member.endpoints)
