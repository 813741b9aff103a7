"""Members of a cluster as instances: those that publish the URL of their engine come and go by themselves.

The wanted state is what the cluster last said; every half second the fleet is brought towards it. A member that leaves,
is lost or has come back as another process gets no new requests, and is removed when its last one has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvpool.cluster import Cluster, Member
from kvpool.control.router.fleet import Fleet
from kvpool.control.router.lease import Instance
from kvpool.control.router.logs import event
from kvpool.control.router.settings import ClusterSettings, EventsSpec, InstanceSpec
from kvpool.errors import ArgumentError

__all__ = ["ClusterInstances"]


@dataclass
class _Followed:
    """A member that became an instance, or could not yet."""

    member: Member
    instance: Instance | None = None
    cause: str = ""  # that it could not
    events_cause: str = ""  # that its events cannot be followed


class ClusterInstances:
    """Brings the fleet to what the cluster says. `reconcile` belongs to the fleet's event loop.

    Args:
        settings: Which cluster.
        fleet: The instances; those that the operator has named are left alone.
        add: Adds an instance.
        remove: Removes one that has no requests.

    Raises:
        ArgumentError, DeadlineExceeded, AuthError, StateError: As Cluster.join.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        fleet: Fleet,
        add: Callable[[InstanceSpec], Instance],
        remove: Callable[[str], Awaitable[None]],
    ) -> None:
        self._cluster = Cluster.join(
            settings.url,
            tls_ca=settings.tls_ca,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            user=settings.user,
            password=settings.password,
        )
        self._fleet = fleet
        self._add = add
        self._remove = remove
        self._wanted: dict[str, Member] = {}
        self._followed: dict[str, _Followed] = {}

    async def reconcile(self) -> None:
        """Applies what the cluster says now."""
        self._wanted = {member.name: member for member in self._cluster.members() if member.url}
        for name, followed in list(self._followed.items()):
            wanted = self._wanted.get(name)
            if wanted is None or not _same(followed.member, wanted):
                await self._retire(name, followed)
            elif followed.instance is None:
                self._follow(followed)
            else:
                self._fleet.set_leaving(followed.instance, wanted.state != "up")
        for name, member in self._wanted.items():
            if name not in self._followed:
                self._followed[name] = _Followed(member)
                self._follow(self._followed[name])

    def close(self) -> None:
        """Stops to watch. Idempotent."""
        self._cluster.close()

    # ---- inside

    def _follow(self, followed: _Followed) -> None:
        """The member becomes an instance, unless another one has its name or URL, or they are wrong."""
        member = followed.member
        try:
            spec = InstanceSpec(member.name, member.url.rstrip("/"), member.role, member.rank, _events_of(followed))
            followed.instance = self._add(spec)
        except ArgumentError as error:
            if str(error) != followed.cause:  # it is tried again, and told once
                event(logging.WARNING, "member not routed to", member=member.name, cause=str(error))
            followed.cause = str(error)
            return
        self._fleet.set_leaving(followed.instance, self._wanted[member.name].state != "up")

    async def _retire(self, name: str, followed: _Followed) -> None:
        instance = followed.instance
        if instance is not None and self._fleet.find(name) is instance:  # else the operator has removed it
            self._fleet.set_leaving(instance, True)
            if instance.in_flight:
                return  # until its requests have ended
            await self._remove(name)
        del self._followed[name]


def _events_of(followed: _Followed) -> EventsSpec | None:
    """Where a member publishes KV events; None for nowhere. With a wrong address it is routed to without them."""
    member = followed.member
    if not member.events:
        return None
    try:
        return EventsSpec(member.events, member.events_replay or None)
    except ArgumentError as error:
        if not followed.events_cause:
            event(logging.WARNING, "member's events not followed", member=member.name, cause=str(error))
        followed.events_cause = str(error)
        return None


def _same(one: Member, other: Member) -> bool:
    """Whether it is the same process at the same place. One that has lost its lease and is back is the same."""
    same = ("instance", "incarnation", "url", "role", "rank", "events", "events_replay")
    return all(getattr(one, name) == getattr(other, name) for name in same)
