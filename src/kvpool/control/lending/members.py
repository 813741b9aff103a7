"""The ledger that a member keeps of all members, and what they say of settlements: in step with the cluster."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping

from kvpool.cluster import Cluster, Member, MemberEvent
from kvpool.control.lending.records import row_from, said_from
from kvpool.errors import ArgumentError, PeerLost
from kvpool.policy import lending

__all__ = ["LendingMembers"]

_log = logging.getLogger("kvpool.lending")


class LendingMembers:
    """Keeps a ledger in step with a cluster. One thread at a time may call.

    What the cluster tells waits until `apply`. A correction counts until the member's next row, and at most
    `forgive_s`: one that has room again publishes no row if it stands where it stood in its last.

    Args:
        cluster: Whose members.
        settler: Hears what they say. Its ledger is kept.
        forgive_s: Seconds for which a correction counts.
        clock: Seconds, of any origin.
    """

    def __init__(
        self,
        cluster: Cluster,
        settler: lending.Settler,
        forgive_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = settler.ledger
        self._settler = settler
        self._forgive_s = forgive_s
        self._clock = clock
        self._names: dict[int, str] = {}
        self._corrected: dict[int, float] = {}  # when
        self._ended: set[int] = set()  # members that lend no more
        self._events: queue.SimpleQueue[MemberEvent] = queue.SimpleQueue()
        self._watch = cluster.on_change(self._events.put)

    def apply(self) -> None:
        """Takes the rows that have arrived, and ends corrections that are old."""
        while not self._events.empty():  # the callers alone take from it, one at a time
            event = self._events.get()
            if event.kind in ("left", "lost"):
                self._remove(event.member)
            else:
                self._show(event.member)
        now = self._clock()
        for instance in [each for each, at in self._corrected.items() if now >= at + self._forgive_s]:
            del self._corrected[instance]
            self.ledger.forgive(instance)

    def name(self, instance: int) -> str:
        """The name of a member. Raises PeerLost if it has gone."""
        try:
            return self._names[instance]
        except KeyError:
            raise PeerLost(f"member {instance} has left the cluster", instance=instance) from None

    def no_creditors(self) -> frozenset[int]:
        """Members that lend no more: they are leaving, or take no part any longer."""
        return frozenset(self._ended)

    def correct(self, instance: int, lendable: int) -> None:
        """Notes what a member can lend, by its refusal or by what it has just lent: its row says more."""
        self.ledger.correct(instance, lendable)
        self._corrected[instance] = self._clock()

    def wanted(self) -> Mapping[int, int]:
        """How many blocks each member wants back of those that it has lent."""
        return {row.member: row.wants for row in self.ledger if row.wants}

    def close(self) -> None:
        """Watches no more. Idempotent."""
        self._watch.close()

    def _show(self, member: Member) -> None:
        self._names[member.instance] = member.name
        if member.state == "up" and member.lending:
            self._ended.discard(member.instance)
        else:
            self._ended.add(member.instance)
        try:
            row = row_from(member)
        except ArgumentError as error:
            _log.warning("%s", error, extra={"member": member.name, "why": "its row cannot be read"})
            return
        if row is None:
            self._settler.hear(member.instance, None)
        elif self.ledger.take(row):
            self._corrected.pop(member.instance, None)
            self._settler.hear(member.instance, _said(member))  # what it says is as old as its row

    def _remove(self, member: Member) -> None:
        instance = member.instance
        if not self.ledger.leave(instance, member.term):
            return  # its loss is told late: its own member has published a row of its next term
        self._settler.hear(instance, None)
        self._names.pop(instance, None)
        self._corrected.pop(instance, None)
        self._ended.discard(instance)


def _said(member: Member) -> lending.Said | None:
    try:
        return said_from(member)
    except ArgumentError as error:
        _log.warning("%s", error, extra={"member": member.name, "why": "what it says of settlements cannot be read"})
        return None
