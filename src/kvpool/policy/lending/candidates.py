"""Which creditors a borrower asks: three at a time, near ones and those with much room first, but not always the same.

Every member draws by itself, from rows that are a little old. If all took the best creditor, all would ask the same
one. So candidates are drawn, with weights, by dice that differ from borrower to borrower.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import nlargest
from math import log
from random import Random
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of
from kvpool.policy.lending.ledger import Ledger

__all__ = ["CANDIDATES", "Search", "Weights", "candidates"]

CANDIDATES: Final = 3
_SMALLEST: Final = 2.0**-54  # below each other value of the dice that is not 0


@dataclass(frozen=True)
class Weights:
    """What makes a creditor likely to be drawn.

    Attributes:
        near: How many times as likely a creditor of the borrower's host is.
        room: The power of what a creditor can lend: 0 takes all alike, 2 prefers the emptiest more.
    """

    near: float = 4.0
    room: float = 1.0

    def __post_init__(self) -> None:
        """Raises ArgumentError for weights that are no weights."""
        if not (0 < self.near < float("inf") and 0 <= self.room < float("inf")):
            raise ArgumentError(f"weights {self.near} and {self.room}: not finite numbers above and from 0")


def candidates(
    ledger: Ledger,
    borrower: int,
    blocks: int,
    dice: Random,
    without: Collection[int] = (),
    weights: Weights | None = None,
) -> tuple[int, ...]:
    """Up to three members, each of which can lend all the blocks by what its row says; in the order to ask them.

    Drawn without replacement, each with a chance in proportion to its weight. Never the borrower, never a member that
    borrows itself, none beyond its `lend_max`.

    Args:
        ledger: The ledger of the member that asks.
        borrower: Who needs blocks. Without a row of it, all members are equally near.
        blocks: How many, from one creditor.
        dice: Seeded by the caller.
        without: Members that are left out.
        weights: Of nearness and room.
    """
    count_of(blocks, "the blocks that a borrower needs", 1)
    weights = weights or Weights()
    own = ledger.get(borrower)
    drawn: list[tuple[float, int]] = []
    for row in sorted(ledger, key=lambda row: row.member):  # not by when the rows came, so that a seed can be replayed
        lendable = ledger.lendable(row.member)
        if row.member == borrower or row.member in without or lendable < blocks:
            continue
        weight = weights.room * log(lendable)  # all as logarithms: powers of large numbers overflow
        if own is not None and row.host == own.host:
            weight += log(weights.near)
        # The largest of log(weight) - log(-log(u)), u uniform, are a weighted draw without replacement (Gumbel).
        drawn.append((weight - log(-log(dice.random() or _SMALLEST)), row.member))
    return tuple(member for _, member in nlargest(CANDIDATES, drawn))


class Search:
    """How one borrower looks for one creditor: asks three in turn, and when all have refused, draws again.

    A member that refused is left out until a later row of it arrives. When nobody is left `propose` returns nothing:
    the borrower waits for news, asks for fewer blocks, or does without.

        search = Search(borrower=7, blocks=64, seed=3)
        for creditor in search.propose(ledger):
            ask it; on a refusal: search.refuse(ledger, creditor, lendable)
    """

    def __init__(self, borrower: int, blocks: int, seed: int, weights: Weights | None = None) -> None:
        """Begins a search. The seed and the borrower determine what is drawn."""
        self._borrower = borrower
        self._blocks = count_of(blocks, "the blocks that a borrower needs", 1)
        self._dice = Random(f"{seed}/{borrower}")
        self._weights = weights
        self._refused: dict[int, tuple[int, int]] = {}  # the row's version when the member refused

    def propose(self, ledger: Ledger, without: Collection[int] = ()) -> tuple[int, ...]:
        """The next candidates, without some members; empty if no member is left that might lend."""
        left_out = {member for member, version in self._refused.items() if ledger.version(member) <= version}
        left_out.update(without)
        return candidates(ledger, self._borrower, self._blocks, self._dice, left_out, self._weights)

    def refuse(self, ledger: Ledger, creditor: int, lendable: int) -> None:
        """Notes a refusal, here and in the ledger, with what the creditor says it can lend."""
        ledger.correct(creditor, lendable)
        self._refused[creditor] = ledger.version(creditor)
