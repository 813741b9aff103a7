"""The picture of a cluster in memory: who is there. A directory paints it; members(), callbacks and waiters read it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal, get_args

from kvpool.cluster.record import Kind, Member, MemberEvent
from kvpool.waiting.threads import busy

__all__ = ["Board"]

_log = logging.getLogger("kvpool.cluster")


class Board:
    """Who is there. Any thread may call anything; events come to every sink in one order."""

    def __init__(self) -> None:
        """Nobody is there."""
        self._changed = threading.Condition()
        self._members: dict[str, Member] = {}
        self._sinks: list[Callable[[MemberEvent], None]] = []
        self._told = dict.fromkeys(get_args(Kind), 0)

    def show(self, member: Member) -> None:
        """A member is there, as it says. One of the same name that was another incarnation is lost."""
        with busy, self._changed:
            before = self._members.get(member.name)
            if before is not None and before.same_incarnation(member):
                if before != member:
                    self._put("changed", dataclasses.replace(member, since_ns=before.since_ns))
                return
            if before is not None:
                is_same = before.epoch == member.epoch
                why = "it is back in a new term" if is_same else "another incarnation has its name"
                self._remove(before, "lost", why)
            self._put("joined", dataclasses.replace(member, since_ns=time.monotonic_ns()))

    def remove(self, name: str, kind: Literal["left", "lost"], why: str) -> None:
        """A member is gone, and why. Nothing happens if it was not there."""
        with busy, self._changed:
            before = self._members.get(name)
            if before is not None:
                self._remove(before, kind, why)

    def members(self) -> list[Member]:
        """Who is there, by name."""
        with busy, self._changed:
            return [self._members[name] for name in sorted(self._members)]

    def find(self, name: str) -> Member | None:
        """One member."""
        with busy, self._changed:
            return self._members.get(name)

    def told(self) -> dict[Kind, int]:
        """How many events of each kind there have been."""
        with busy, self._changed:
            return dict(self._told)

    def subscribe(self, sink: Callable[[MemberEvent], None]) -> None:
        """Tells `sink` of who is there, as "joined", and of every change from now on. It must not wait or raise."""
        with busy, self._changed:
            for name in sorted(self._members):
                sink(MemberEvent("joined", self._members[name]))
            self._sinks.append(sink)

    def unsubscribe(self, sink: Callable[[MemberEvent], None]) -> None:
        """Tells it no more. Idempotent."""
        with busy, self._changed:
            if sink in self._sinks:
                self._sinks.remove(sink)

    def wait(self, enough: Callable[[list[Member]], bool], until: float) -> list[Member]:
        """Waits until `enough(members())`, or for `until` (time.monotonic()). Returns who is there then."""
        with busy, self._changed:
            self._changed.wait_for(lambda: enough(self.members()), max(0.0, until - time.monotonic()))
            return self.members()

    def wake(self) -> None:
        """Lets waiters look again, for what is not on the board."""
        with busy, self._changed:
            self._changed.notify_all()

    def _put(self, kind: Literal["joined", "changed"], member: Member) -> None:
        self._members[member.name] = member
        self._tell(MemberEvent(kind, member), "")

    def _remove(self, member: Member, kind: Literal["left", "lost"], why: str) -> None:
        del self._members[member.name]
        self._tell(MemberEvent(kind, member), why)

    def _tell(self, event: MemberEvent, why: str) -> None:
        self._told[event.kind] += 1
        if event.kind != "changed":
            member = event.member
            what = f"{event.kind}: {why}" if why else event.kind
            fields = member._log_fields(why) | {"event": event.kind}
            _log.info("%s (instance %d, epoch %d) %s", member.name, member.instance, member.epoch, what, extra=fields)
        for sink in self._sinks:
            sink(event)
        self._changed.notify_all()
