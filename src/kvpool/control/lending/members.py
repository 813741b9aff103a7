"""The ledger that a member keeps of all members: rows out of their records, and this member's row into its record."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from platform import node
from typing import Any, Final

from kvpool.cluster import Cluster, Member, MemberEvent
from kvpool.errors import ArgumentError, PeerLost
from kvpool.policy import lending
from kvpool.types import Medium

__all__ = ["LendingMembers", "row_from", "row_json", "this_host"]

_log = logging.getLogger("kvpool.lending")

_VERSION: Final = 1


def row_json(row: lending.Row) -> dict[str, Any]:
    """What a member publishes of a row: the rest is in its record."""
    return {
        "v": _VERSION,
        "version": row.version,
        "host": row.host,
        "blocks": row.blocks,
        "free": {str(int(medium)): blocks for medium, blocks in row.free.items()},
        "lend_max": row.lend_max,
        "lent": row.lent,
        "wants": row.wants,
        "debts": {str(creditor): blocks for creditor, blocks in row.debts.items()},
    }


def row_from(member: Member) -> lending.Row | None:
    """The row in a member's record; None if it takes no part in lending, or publishes what this version cannot read.

    Raises:
        ArgumentError: It is no row that a member can be in.
    """
    fields = member.lending
    if not fields or fields.get("v") != _VERSION:
        return None
    try:
        return lending.Row(
            member.instance,
            member.term,
            fields["version"],
            fields["host"],
            fields["blocks"],
            {Medium(int(medium)): blocks for medium, blocks in fields["free"].items()},
            fields["lend_max"],
            fields["lent"],
            {int(creditor): blocks for creditor, blocks in fields["debts"].items()},
            fields["wants"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # an ArgumentError is a ValueError
        raise ArgumentError(f"{member.name} publishes a row that cannot be: {error!r}") from None


@lru_cache(maxsize=1)
def this_host() -> str:
    """Tells this machine from others, whatever names containers give it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return node()


class LendingMembers:
    """Keeps a ledger in step with a cluster. One thread at a time may call.

    What the cluster tells waits until `apply`. A correction counts until the member's next row, and at most
    `forgive_s`: one that has room again publishes no row if it stands where it stood in its last.

    Args:
        cluster: Whose members.
        forgive_s: Seconds for which a correction counts.
        clock: Seconds, of any origin.
    """

    def __init__(self, cluster: Cluster, forgive_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger = lending.Ledger()
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
                self._remove(event.member.instance)
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
        if row is not None and self.ledger.take(row):
            self._corrected.pop(member.instance, None)

    def _remove(self, instance: int) -> None:
        self.ledger.leave(instance)
        self._names.pop(instance, None)
        self._corrected.pop(instance, None)
        self._ended.discard(instance)
