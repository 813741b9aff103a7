"""While a cycle is settled its debts are frozen: nobody pays them otherwise, recalls them or ends them.

The coordinator asks every member of the cycle for a freeze, and calls the steps when all have agreed. A freeze ends by
itself: when its time is over, and as soon as a member has left or come back in a new term. So a coordinator
that dies between two steps holds nobody up, and what was brought home until then stays there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of
from kvpool.policy.lending.ledger import Ledger
from kvpool.policy.lending.settle import Settlement

__all__ = ["Freeze", "Freezes", "freeze_of"]


@dataclass(frozen=True)
class Freeze:
    """What a coordinator asks for.

    Attributes:
        settlement: The cycle, and how many blocks of each debt are frozen.
        terms: Of the members, in their order.
        number: Counts the coordinator's freezes, and orders them.
        expires: When it ends, on the clock of the member that keeps it.
    """

    settlement: Settlement
    terms: tuple[int, ...]
    number: int
    expires: float

    def __post_init__(self) -> None:
        """Raises ArgumentError if there is not a term for each member, or it would never end."""
        count_of(self.number, "the number of a freeze", 0)
        if len(self.terms) != len(self.settlement.members):
            raise ArgumentError(f"{len(self.terms)} terms for {len(self.settlement.members)} members")
        for term in self.terms:
            count_of(term, "the term of a member", 0)
        if not isfinite(self.expires):
            raise ArgumentError(f"a freeze expires at {self.expires}, which never comes")

    def void(self, ledger: Ledger, now: float) -> str:
        """Why it does not count any more; "" while it counts."""
        if now >= self.expires:
            return "its time is over"
        for member, term in zip(self.settlement.members, self.terms, strict=True):
            row = ledger.get(member)
            if row is None:
                return f"member {member} has left"
            if row.term != term:
                return f"member {member} is in term {row.term}, and was in {term}"
        return ""

    def after(self, blocks: int) -> Freeze | None:
        """The freeze when so many blocks of each debt have come home; None when that is all."""
        left = self.settlement.blocks - blocks
        return replace(self, settlement=replace(self.settlement, blocks=left)) if left > 0 else None


def freeze_of(settlement: Settlement, ledger: Ledger, number: int, expires: float) -> Freeze:
    """The freeze for a settlement, with the terms that the ledger has. Raises ArgumentError if a member has no row."""
    terms = []
    for member in settlement.members:
        row = ledger.get(member)
        if row is None:
            raise ArgumentError(f"member {member} of the cycle has no row")
        terms.append(row.term)
    return Freeze(settlement, tuple(terms), number, expires)


class Freezes:
    """The freezes that one member has agreed to: one at a time.

    If two coordinators each have a part of the members, both are refused by the others, both freezes end, and both try
    again: nothing is moved before all have agreed, so nothing has to be taken back.

    Not thread-safe.
    """

    def __init__(self, member: int) -> None:
        """None yet, for this member."""
        self._member = member
        self._freeze: Freeze | None = None
        self._latest: dict[int, tuple[int, int]] = {}  # term and number of each coordinator's latest freeze

    def agree(self, freeze: Freeze, ledger: Ledger, now: float) -> bool:
        """Agrees to a freeze, unless it is void or another one counts.

        A later freeze of the same coordinator replaces its earlier one. The present one again is agreed to again, and
        stays as it is: blocks that have come home since are not frozen anew. One that has ended is not agreed to again:
        requests may arrive late and twice.

        Raises:
            ArgumentError: This member is not on the cycle.
        """
        if self._member not in freeze.settlement.members:
            raise ArgumentError(f"member {self._member} is not on the cycle {freeze.settlement.members}")
        if freeze.void(ledger, now):
            return False
        held = self.current(ledger, now)
        coordinator = freeze.settlement.coordinator
        if held is not None and held.settlement.coordinator != coordinator:
            return False
        this = (freeze.terms[0], freeze.number)
        latest = self._latest.get(coordinator, (-1, -1))
        if this <= latest:
            return held is not None and this == latest and held.settlement.members == freeze.settlement.members
        self._latest[coordinator] = this
        self._freeze = freeze
        return True

    def current(self, ledger: Ledger, now: float) -> Freeze | None:
        """The freeze that counts now."""
        if self._freeze is not None and self._freeze.void(ledger, now):
            self._freeze = None
        return self._freeze

    def frozen(self, debtor: int, creditor: int, ledger: Ledger, now: float) -> int:
        """How many blocks of a debt are frozen: they stay until the freeze ends, or its coordinator calls."""
        held = self.current(ledger, now)
        return held.settlement.blocks if held is not None and (debtor, creditor) in held.settlement.debts else 0

    def brought(self, coordinator: int, number: int, blocks: int) -> None:
        """Notes that so many blocks of a frozen debt have come home; the freeze is lifted when that is all."""
        count_of(blocks, "the blocks that came home", 0)
        held = self._freeze
        if held is not None and (held.settlement.coordinator, held.number) == (coordinator, number):
            self._freeze = held.after(blocks)

    def lift(self, coordinator: int, number: int) -> None:
        """Ends a freeze before its time. Nothing happens if it is not the present one."""
        held = self._freeze
        if held is not None and (held.settlement.coordinator, held.number) == (coordinator, number):
            self._freeze = None
