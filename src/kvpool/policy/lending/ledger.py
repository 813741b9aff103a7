"""The ledger of debts: who has how much memory free, who may lend it, and who owes blocks to whom.

Every member publishes a row, and every member keeps a ledger of all rows. Rows arrive late, twice or in the wrong
order, so a ledger is right only loosely: it proposes, and the creditor that is asked decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of, text_of
from kvpool.types import Medium

__all__ = ["BLOCKS_MAX", "PUBLISHED_PART", "Debts", "Ledger", "Row", "worth_publishing"]

# Blocks that each debtor has at each creditor, by (debtor, creditor).
Debts = Mapping[tuple[int, int], int]

PUBLISHED_PART: Final = 0.05

# More blocks than any member can have. Rows come from other machines: a wrong one must not overflow the sums of all.
BLOCKS_MAX: Final = 1 << 40

_LATEST: Final = 1 << 62


@dataclass(frozen=True)
class Row:
    """What a member says of itself.

    Attributes:
        member: Its instance id.
        term: How often it has lost its lease and come back. A row of a later term replaces those of earlier ones.
        version: Counts the rows of the term.
        host: Members of one host reach each other without a network.
        blocks: All blocks that it has.
        free: How many of them are free, by medium.
        lend_max: It lends at most this many.
        lent: How many it lends now.
        debts: Its blocks that lie with others, by creditor.
        wants: How many of the blocks that it lends it wants back.
    """

    member: int
    term: int
    version: int
    host: str
    blocks: int
    free: Mapping[Medium, int]
    lend_max: int
    lent: int = 0
    debts: Mapping[int, int] = field(default_factory=dict)
    wants: int = 0

    def __post_init__(self) -> None:
        """Raises ArgumentError for a row that no member can be in."""
        who = f"the row of member {self.member!r}"
        count_of(self.member, "a member's id", 1)
        for name in ("term", "version", "blocks", "lend_max", "lent", "wants"):
            count_of(getattr(self, name), f"{name} in {who}", 0)
        text_of(self.host, f"host in {who}")
        for medium, blocks in self.free.items():
            count_of(blocks, f"free {medium!r} in {who}", 0)
        for creditor, blocks in self.debts.items():
            count_of(creditor, f"a creditor in {who}", 1)
            count_of(blocks, f"the debt to {creditor} in {who}", 1)
        for what, blocks in (("blocks", self.blocks), ("blocks owed", sum(self.debts.values()))):
            if blocks > BLOCKS_MAX:
                raise ArgumentError(f"{who} says {blocks} {what}; no member has more than {BLOCKS_MAX}")
        if self.wants > self.lent:
            raise ArgumentError(f"{who}: it wants {self.wants} blocks back, and lends {self.lent}")
        if self.member in self.debts:
            raise ArgumentError(f"{who} says that it owes blocks to itself")
        if self.free_blocks + self.lent > self.blocks:
            raise ArgumentError(f"{who}: {self.free_blocks} blocks free and {self.lent} lent, of {self.blocks}")
        object.__setattr__(self, "free", MappingProxyType(dict(self.free)))
        object.__setattr__(self, "debts", MappingProxyType(dict(self.debts)))

    @property
    def free_blocks(self) -> int:
        """Free blocks of all media: DRAM lends too."""
        return sum(self.free.values())

    @property
    def can_lend(self) -> int:
        """How many blocks it has to lend within its cap: what it answers by when it is asked."""
        return max(0, min(self.free_blocks, self.lend_max - self.lent))

    @property
    def lendable(self) -> int:
        """How many blocks others may ask it for: none while it borrows, so that nothing is lent on."""
        return 0 if self.debts else self.can_lend


class Ledger:
    """The rows of all members, as far as they have arrived.

    Not thread-safe. Invariants: the row of a member is the latest that was ever taken; a member that left comes back
    only in a later term.

    Args:
        borrowers_lend: Whether members that borrow are asked to lend, as the paper draws it (Fig 4). No live member
            does that: what was borrowed is not lent on.
    """

    def __init__(self, *, borrowers_lend: bool = False) -> None:
        self._borrowers_lend = borrowers_lend
        self._rows: dict[int, Row] = {}
        self._latest: dict[int, tuple[int, int]] = {}  # term and version, also of members that left
        self._corrected: dict[int, int] = {}  # at most so many blocks can be had, as the member's own answer said

    def __contains__(self, member: int) -> bool:
        return member in self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, member: int) -> Row | None:
        """The row of a member, None if it has none."""
        return self._rows.get(member)

    def take(self, row: Row) -> bool:
        """Takes a row, and with it forgets what refusals had said. False: it is not later than the row that is here."""
        if (row.term, row.version) <= self._latest.get(row.member, (-1, -1)):
            return False
        self._latest[row.member] = (row.term, row.version)
        self._rows[row.member] = row
        self._corrected.pop(row.member, None)
        return True

    def leave(self, member: int, term: int | None = None) -> bool:
        """Forgets a member that has left. Rows of its term that are still under way are not taken.

        `term`: In which it left, if that is known. False: the row here is of a later one, so the member has come back
        since, and stays.
        """
        row = self._rows.get(member)
        if row is not None and term is not None and row.term > term:
            return False
        if row is not None:
            del self._rows[member]
            self._latest[member] = (row.term, _LATEST)
        self._corrected.pop(member, None)
        return True

    def forgive(self, member: int) -> None:
        """Forgets what refusals of a member had said.

        A member that has room again publishes no row if it stands where it stood in its last one. So a correction must
        not count for ever: the caller ends it after a while.
        """
        self._corrected.pop(member, None)

    def correct(self, member: int, lendable: int) -> None:
        """Notes what a creditor answered: it can lend no more than this. Counts until its next row, or `forgive`."""
        count_of(lendable, f"what member {member} can lend", 0)
        if member in self._rows:
            self._corrected[member] = min(lendable, self.lendable(member))

    def lendable(self, member: int) -> int:
        """How many blocks a member may lend, by its row and what it answered since; 0 if it has no row."""
        row = self._rows.get(member)
        if row is None:
            return 0
        most = row.can_lend if self._borrowers_lend else row.lendable
        return min(most, self._corrected.get(member, most))

    def version(self, member: int) -> tuple[int, int]:
        """Term and version of the latest row of a member; (-1, -1) if there never was one."""
        return self._latest.get(member, (-1, -1))

    def debts(self) -> dict[tuple[int, int], int]:
        """The debts between members that are here."""
        return {
            (row.member, creditor): blocks
            for row in self._rows.values()
            for creditor, blocks in row.debts.items()
            if creditor in self._rows
        }


def worth_publishing(old: Row | None, new: Row, part: float = PUBLISHED_PART) -> bool:
    """Whether a row has moved so far from the last that was published that others should learn of it.

    That is: free or lent blocks or debts moved by this part of the member's blocks, or it begins or ends to borrow, to
    be able to lend or to want blocks back, or what it is has changed. A row costs every member that watches the time to
    read it.
    """
    if not 0 <= part <= 1:
        raise ArgumentError(f"part is {part}, not a number from 0 to 1")
    if old is None:
        return True
    if (old.term, old.host, old.blocks, old.lend_max) != (new.term, new.host, new.blocks, new.lend_max):
        return True
    flags = [(bool(row.debts), bool(row.lendable), bool(row.wants)) for row in (old, new)]
    if flags[0] != flags[1]:
        return True
    media = old.free.keys() | new.free.keys()
    creditors = old.debts.keys() | new.debts.keys()
    moved = max(
        sum(abs(new.free.get(medium, 0) - old.free.get(medium, 0)) for medium in media),
        abs(new.lent - old.lent),
        sum(abs(new.debts.get(creditor, 0) - old.debts.get(creditor, 0)) for creditor in creditors),
    )
    return moved > 0 and moved >= part * new.blocks
