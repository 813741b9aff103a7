"""The blocks of one instance that lends and borrows: what is free, whose the others are, and what lies elsewhere.

Only counts and places in a sequence are kept: blocks have no contents here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.errors import OutOfBlocks
from kvpool.policy import lending
from kvpool.types import Medium

__all__ = ["Memory", "Stored"]


@dataclass
class Stored:
    """The blocks of a sequence.

    Attributes:
        name: The sequence's.
        blocks: All that it has, at home and elsewhere.
        written: How many of them hold tokens already.
        loans: Ranges that lie with creditors.
    """

    name: int
    blocks: int = 0
    written: int = 0
    loans: list[lending.Loan] = field(default_factory=list)

    @property
    def away(self) -> int:
        """Blocks that lie with creditors."""
        return sum(loan.blocks for loan in self.loans)

    def at(self) -> dict[int, int]:
        """Blocks by creditor."""
        found: dict[int, int] = {}
        for loan in self.loans:
            found[loan.creditor] = found.get(loan.creditor, 0) + loan.blocks
        return found

    def held(self) -> lending.Held:
        """As the plan of an offload wants it."""
        home = []
        begin = 0
        for loan in sorted(self.loans, key=lambda each: each.first):
            if loan.first > begin:
                home.append((begin, loan.first))
            begin = loan.first + loan.blocks
        if begin < self.blocks:
            home.append((begin, self.blocks))
        return lending.Held(self.name, self.blocks, home, tuple(self.at()))


class Memory:
    """One instance's blocks.

    Invariant: free blocks, staged ones, those of local sequences at home, and lent ones are together `blocks`.

    Args:
        member: The instance's id.
        blocks: All that it has.
        lend_max: It lends at most this many.
        reserve: Free blocks that it does not lend.
        host: Of the machine.
    """

    def __init__(self, member: int, blocks: int, lend_max: int = 0, reserve: int = 0, host: str = "host") -> None:
        self.member, self.blocks, self.lend_max, self.reserve, self.host = member, blocks, lend_max, reserve, host
        self.free = blocks
        self.sequences: dict[int, Stored] = {}
        self.lent: dict[int, int] = {}  # by debtor
        self.debts: dict[int, int] = {}  # by creditor
        self.staged: dict[int, int] = {}  # by sequence: through which a prompt's blocks go out
        self.most_lent = 0
        self._versions = 0
        self._loans = 0

    # ---- of its sequences

    def grow(self, name: int, blocks: int, moves: Sequence[lending.Offload] = ()) -> dict[int, int]:
        """Gives a sequence, new or not, more blocks, while others, or some of these, go to creditors.

        The creditors have lent the room. Returns how many blocks must be copied to each: those with tokens in them.

        Raises:
            OutOfBlocks: That leaves too few at home; nothing has changed.
        """
        free = self.free + sum(move.blocks for move in moves)
        if blocks > free:
            raise OutOfBlocks(f"{blocks} blocks for sequence {name}", requested=blocks, free=free)
        self.free -= blocks
        self.sequences.setdefault(name, Stored(name)).blocks += blocks
        return self.move(moves)

    def move(self, moves: Sequence[lending.Offload]) -> dict[int, int]:
        """Blocks go to creditors, which have lent the room; returns as `grow` does."""
        copied: dict[int, int] = {}
        for move in moves:
            copied[move.creditor] = copied.get(move.creditor, 0) + self._go(move)
        return copied

    def adopt(self, stored: Stored) -> None:
        """Takes a sequence that comes from another instance with all its blocks. Raises OutOfBlocks."""
        self.grow(stored.name, stored.blocks)
        self.sequences[stored.name].written = stored.written

    def stage(self, name: int, blocks: int) -> None:
        """Keeps blocks for a prompt on its way out, until `unstage` or the end of its sequence."""
        if blocks:
            self.free -= blocks
            self.staged[name] = blocks

    def unstage(self, name: int) -> None:
        """Frees them, if there are any."""
        self.free += self.staged.pop(name, 0)

    def end(self, name: int) -> dict[int, int]:
        """Ends a sequence; the blocks by creditor that are now to be given back (`returned` there)."""
        self.unstage(name)
        stored = self.sequences.pop(name)
        self.free += stored.blocks - stored.away
        given = stored.at()
        for creditor, blocks in given.items():
            self._owe(creditor, -blocks)
        return given

    # ---- as a debtor

    def come(self, back: lending.Payback) -> None:
        """Blocks come home: the last ones of a loan. Raises OutOfBlocks where no room is."""
        if back.blocks > self.free:
            raise OutOfBlocks(f"{back.blocks} blocks come home", requested=back.blocks, free=self.free)
        stored = self.sequences[int(str(back.sequence))]
        (loan,) = (each for each in stored.loans if each.first + each.blocks == back.first + back.blocks)
        stored.loans.remove(loan)
        if loan.first < back.first:
            left = lending.Loan(loan.sequence, loan.creditor, loan.first, back.first - loan.first, loan.since)
            stored.loans.append(left)
        self._owe(back.creditor, -back.blocks)
        self.free -= back.blocks

    def loans(self) -> Iterator[lending.Loan]:
        """Of all sequences."""
        for stored in self.sequences.values():
            yield from stored.loans

    # ---- as a creditor

    @property
    def can_lend(self) -> int:
        """What it answers by when it is asked."""
        return max(0, min(self.free - self.reserve, self.lend_max - sum(self.lent.values())))

    def lend(self, debtor: int, blocks: int) -> bool:
        """Lends room if it has so much; first come, first served."""
        if blocks > self.can_lend:
            return False
        self.free -= blocks
        self.lent[debtor] = self.lent.get(debtor, 0) + blocks
        self.most_lent = max(self.most_lent, sum(self.lent.values()))
        return True

    def returned(self, debtor: int, blocks: int) -> None:
        """A debtor gives room back."""
        self.lent[debtor] -= blocks
        if not self.lent[debtor]:
            del self.lent[debtor]
        self.free += blocks

    # ---- for all to know

    def row(self) -> lending.Row:
        """What it says of itself; each call makes a later version."""
        self._versions += 1
        lent = sum(self.lent.values())
        return lending.Row(
            self.member,
            1,
            self._versions,
            self.host,
            self.blocks,
            {Medium.HBM: max(0, self.free - self.reserve)},
            self.lend_max,
            lent,
            dict(self.debts),
            self._wants(lent),
        )

    def stands_as(self, row: lending.Row) -> bool:
        """Whether a row of now would say the same; quicker than making it."""
        lent = sum(self.lent.values())
        said = (row.free_blocks, row.lent, row.wants)
        return said == (max(0, self.free - self.reserve), lent, self._wants(lent)) and row.debts == self.debts

    def check(self) -> None:
        """Raises AssertionError if a block is counted twice, or not at all."""
        home = sum(stored.blocks - stored.away for stored in self.sequences.values())
        lent = sum(self.lent.values())
        assert self.free >= 0, f"member {self.member} has {self.free} blocks free"
        assert self.free + sum(self.staged.values()) + home + lent == self.blocks, f"member {self.member}: {vars(self)}"
        assert lent <= self.lend_max, f"member {self.member} lends {lent} of {self.lend_max}"
        owed: dict[int, int] = {}
        for stored in self.sequences.values():
            end = 0
            for loan in sorted(stored.loans, key=lambda each: each.first):
                assert end <= loan.first, f"two loans of sequence {stored.name} overlap"
                end = loan.first + loan.blocks
                owed[loan.creditor] = owed.get(loan.creditor, 0) + loan.blocks
            assert end <= stored.blocks, f"a loan of sequence {stored.name} ends behind it"
        assert owed == self.debts, f"member {self.member} owes {owed}, and counts {self.debts}"

    def _wants(self, lent: int) -> int:
        return min(lent, max(0, self.reserve - self.free))

    def _owe(self, creditor: int, blocks: int) -> None:
        left = self.debts.get(creditor, 0) + blocks
        if left:
            self.debts[creditor] = left
        else:
            self.debts.pop(creditor, None)

    def _go(self, move: lending.Offload) -> int:
        """Blocks of a sequence go to a creditor, which has lent the room. Returns how many of them must be copied."""
        stored = self.sequences[int(str(move.sequence))]
        self._loans += 1
        stored.loans.append(lending.Loan(stored.name, move.creditor, move.first, move.blocks, self._loans))
        self._owe(move.creditor, move.blocks)
        self.free += move.blocks
        return max(0, min(stored.written, move.first + move.blocks) - move.first)
