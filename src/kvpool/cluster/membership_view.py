"""The members of a cluster, in memory. A directory updates the view; members(), callbacks and waiters read it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal, get_args

from kvpool.cluster.record import Kind, Member, MemberEvent
from kvpool.waiting.threads import busy

__all__ = ["MembershipView"]

_log = logging.getLogger("kvpool.cluster")


class MembershipView:
    """The current members. Any thread may call; every subscriber gets the events in the same order."""

    def __init__(self) -> None:
        """Starts empty."""
        self._changed = threading.Condition()
        self._members: dict[str, Member] = {}
        self._subscribers: list[Callable[[MemberEvent], None]] = []
        self._event_counts = dict.fromkeys(get_args(Kind), 0)

    def show(self, member: Member) -> None:
        """Adds or updates a member. An earlier incarnation of the same name is lost."""
        with busy, self._changed:
            before = self._members.get(member.name)
            if before is not None and before.same_incarnation(member):
                if before != member:
                    self._put("changed", dataclasses.replace(member, since_ns=before.since_ns))
                return
            if before is not None:
                is_same = before.incarnation == member.incarnation
                why = "it came back in a new term" if is_same else "another incarnation has its name"
                self._remove(before, "lost", why)
            self._put("joined", dataclasses.replace(member, since_ns=time.monotonic_ns()))

    def remove(self, name: str, kind: Literal["left", "lost"], why: str) -> None:
        """Removes a member and logs why. Does nothing if there is no such member."""
        with busy, self._changed:
            before = self._members.get(name)
            if before is not None:
                self._remove(before, kind, why)

    def members(self) -> list[Member]:
        """All members, ordered by name."""
        with busy, self._changed:
            return [self._members[name] for name in sorted(self._members)]

    def find(self, name: str) -> Member | None:
        """The member of this name, or None."""
        with busy, self._changed:
            return self._members.get(name)

    def event_counts(self) -> dict[Kind, int]:
        """How many events of each kind there were."""
        with busy, self._changed:
            return dict(self._event_counts)

    def subscribe(self, subscriber: Callable[[MemberEvent], None]) -> None:
        """Calls `subscriber` with "joined" for each member, then with every change. It must not wait or raise."""
        with busy, self._changed:
            for name in sorted(self._members):
                subscriber(MemberEvent("joined", self._members[name]))
            self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[[MemberEvent], None]) -> None:
        """Calls it no more. Idempotent."""
        with busy, self._changed:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

    def wait(self, enough: Callable[[list[Member]], bool], until: float) -> list[Member]:
        """Waits until `enough(members())` or the time `until` (time.monotonic()). Returns the members at that time."""
        with busy, self._changed:
            self._changed.wait_for(lambda: enough(self.members()), max(0.0, until - time.monotonic()))
            return self.members()

    def wake(self) -> None:
        """Makes waiters check again, for a condition outside the view."""
        with busy, self._changed:
            self._changed.notify_all()

    def _put(self, kind: Literal["joined", "changed"], member: Member) -> None:
        self._members[member.name] = member
        self._publish(MemberEvent(kind, member), "")

    def _remove(self, member: Member, kind: Literal["left", "lost"], why: str) -> None:
        del self._members[member.name]
        self._publish(MemberEvent(kind, member), why)

    def _publish(self, event: MemberEvent, why: str) -> None:
        self._event_counts[event.kind] += 1
        if event.kind != "changed":
            member = event.member
            what = f"{event.kind}: {why}" if why else event.kind
            fields = member._log_fields(why) | {"event": event.kind}
            _log.info(
                "%s (instance %d, incarnation %d) %s",
                member.name,
                member.instance,
                member.incarnation,
                what,
                extra=fields,
            )
        for subscriber in self._subscribers:
            subscriber(event)
        self._changed.notify_all()
