"""Debts that go round in a circle are settled: everybody on the circle brings home as many blocks.

If a owes b, b owes c and c owes a, each may bring home as many blocks as the smallest of the three debts: the room that
the blocks need at home is that which the others' blocks leave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.errors import ArgumentError, OutOfBlocks
from kvpool.policy.fields import count_of
from kvpool.policy.lending.circulation import WORK, least_remaining
from kvpool.policy.lending.cycles import components, peel
from kvpool.policy.lending.ledger import Debts

__all__ = ["Settlement", "Step", "settle", "settled", "steps"]

# All debts: their sums are computed in 63 bits. The rows of all members that a cluster can have say less.
_ALL_MAX: Final = 1 << 60


@dataclass(frozen=True)
class Settlement:
    """A cycle of debts, each of which is to shrink by the same number of blocks.

    Attributes:
        members: Each owes the next one, the last owes the first. The smallest id is first.
        blocks: So many each of them brings home.
    """

    members: tuple[int, ...]
    blocks: int

    def __post_init__(self) -> None:
        """Raises ArgumentError if it is not a cycle, or does not begin with the smallest id."""
        if len(self.members) < 2 or len(set(self.members)) != len(self.members):
            raise ArgumentError(f"members {self.members} are not on a cycle")
        count_of(self.members[0], "a member of a cycle", 1)
        if self.members[0] != min(self.members):
            raise ArgumentError(f"members {self.members} do not begin with the smallest id")
        count_of(self.blocks, "the blocks of a settlement", 1)

    @property
    def coordinator(self) -> int:
        """The member that freezes the debts and calls the rounds: the smallest id."""
        return self.members[0]

    @property
    def debts(self) -> tuple[tuple[int, int], ...]:
        """Debtor and creditor of each debt, in the order of the cycle."""
        return tuple(zip(self.members, (*self.members[1:], self.members[0]), strict=True))


@dataclass(frozen=True)
class Step:
    """A debtor brings home so many of its blocks from a creditor."""

    debtor: int
    creditor: int
    blocks: int


def settle(debts: Debts, least: int = 1, work: int = WORK) -> list[list[Settlement]]:
    """The settlements of all debts, in rounds: no member is in two settlements of one round.

    After all of them:

    - No cycle is left whose smallest debt is `least` or more.
    - No debt has grown, and nobody's net debt has changed. This holds after each settlement, so any of them may be
      left out.
    - Each debt that shrinks at all shrinks by `least` or more.
    - As many blocks come home as possible, if `least` is 1 and `work` suffices (docs/internals/lending.md says how many
      otherwise).

    The larger a settlement, the earlier its round. Depends on the debts alone, not on their order: each member that has
    the same ledger finds the same.

    Args:
        debts: Blocks, by debtor and creditor.
        least: Moving fewer blocks of one debt is not worth it.
        work: How many edges of the graph may be looked at in search of the optimum.

    Raises:
        ArgumentError: A debt is negative, or owed to the debtor itself; all debts are more than 2 ** 60 blocks; an id
            or `least` is below 1.
    """
    count_of(least, "the least number of blocks", 1)
    for (debtor, creditor), blocks in debts.items():
        if type(blocks) is not int or blocks < 0:
            count_of(blocks, f"the debt of {debtor} to {creditor}", 0)
        if debtor == creditor:
            raise ArgumentError(f"member {debtor} owes blocks to itself")
    for member in {member for pair in debts for member in pair}:
        count_of(member, "a debtor or creditor", 1)
    if sum(debts.values()) > _ALL_MAX:
        raise ArgumentError(f"debts of {sum(debts.values())} blocks; {_ALL_MAX} are allowed")
    amounts = {pair: debts[pair] for pair in sorted(debts) if debts[pair] >= least}
    cancelled = {
        pair: times * least
        for pair, times in _cancelled({pair: blocks // least for pair, blocks in amounts.items()}, work).items()
    }
    if least > 1:
        cancelled = _cancelled({pair: amounts[pair] for pair in cancelled}, work // 4, least)
        left = {pair: (blocks - cancelled.get(pair, 0)) // least for pair, blocks in amounts.items()}
        for pair, times in _cancelled({pair: times for pair, times in left.items() if times}, work // 4).items():
            cancelled[pair] = cancelled.get(pair, 0) + times * least
    return _in_rounds(_settlements(cancelled))


def settled(debts: Debts, settlements: Iterable[Settlement]) -> dict[tuple[int, int], int]:
    """The debts after some settlements. Raises ArgumentError if one of them takes more than a debt has."""
    left = dict(debts)
    for settlement in settlements:
        for pair in settlement.debts:
            if left.get(pair, 0) < settlement.blocks:
                raise ArgumentError(f"a settlement of {settlement.blocks} blocks, and a debt of {left.get(pair, 0)}")
            left[pair] -= settlement.blocks
            if not left[pair]:
                del left[pair]
    return left


def steps(settlement: Settlement, free: Mapping[int, int], chunk: int) -> Iterator[Step]:
    """The order in which a cycle's blocks come home, so that every step finds room where its blocks go.

    One member with free blocks suffices. It brings home as many as it has room for, at most `chunk`; its creditor then
    has that room, and so on round the cycle. Each time round all have as much room as before, and the next
    `chunk` follows. Stopping after any step leaves smaller debts and nothing else.

    Args:
        settlement: The cycle.
        free: Free blocks of its members.
        chunk: At most so many blocks at a time.

    Raises:
        OutOfBlocks: No member has a free block.
    """
    count_of(chunk, "the blocks of a step", 1)
    room = [free.get(member, 0) for member in settlement.members]
    start = room.index(max(room))
    if room[start] < 1:
        raise OutOfBlocks("no member of the cycle has a free block", requested=1, free=0)
    pairs = settlement.debts[start:] + settlement.debts[:start]
    left = settlement.blocks
    return (
        Step(debtor, creditor, min(chunk, room[start], left - done))
        for done in range(0, left, min(chunk, room[start]))
        for debtor, creditor in pairs
    )


def _cancelled(debts: Debts, work: int, least: int = 0) -> dict[tuple[int, int], int]:
    """How much of each debt is cancelled, `least` or more. Of the debts that are left none is on a cycle."""
    members = sorted({member for pair in debts for member in pair})
    number = {member: at for at, member in enumerate(members)}
    out: list[list[int]] = [[] for _ in members]
    for debtor, creditor in debts:
        out[number[debtor]].append(number[creditor])
    found: dict[tuple[int, int], int] = {}
    for pairs in _by_component(debts, members, components(out)):
        inside = sorted({debtor for debtor, _ in pairs})
        place = {member: at for at, member in enumerate(inside)}
        edges = [(place[debtor], place[creditor]) for debtor, creditor in pairs]
        whole = [debts[pair] for pair in pairs]
        left = least_remaining(len(inside), edges, whole, work, least)
        peel(len(inside), edges, left)  # nothing, unless the work did not suffice
        for pair, before, after in zip(pairs, whole, left, strict=True):
            if before > after:
                found[pair] = before - after
    return found


def _by_component(debts: Debts, members: Sequence[int], found: list[list[int]]) -> list[list[tuple[int, int]]]:
    """The debts within each strongly connected component."""
    component = {members[at]: number for number, inside in enumerate(found) for at in inside}
    pairs: list[list[tuple[int, int]]] = [[] for _ in found]
    for debtor, creditor in debts:
        at = component.get(debtor)
        if at is not None and at == component.get(creditor):
            pairs[at].append((debtor, creditor))
    return pairs


def _settlements(cancelled: Debts) -> list[Settlement]:
    """The cycles of a circulation: as much comes to each member as leaves it."""
    members = sorted({debtor for debtor, _ in cancelled})
    place = {member: at for at, member in enumerate(members)}
    edges = [(place[debtor], place[creditor]) for debtor, creditor in cancelled]
    amounts = list(cancelled.values())
    debtors = [debtor for debtor, _ in cancelled]
    settlements = []
    for cycle, blocks in peel(len(members), edges, amounts):
        on = list(map(debtors.__getitem__, cycle))
        first = on.index(min(on))
        settlements.append(Settlement((*on[first:], *on[:first]), blocks))
    return settlements


def _in_rounds(settlements: list[Settlement]) -> list[list[Settlement]]:
    """Each settlement comes in the round after the last one that has a larger settlement of one of its members."""
    busy: defaultdict[int, int] = defaultdict(int)
    rounds: list[list[Settlement]] = []
    for settlement in sorted(settlements, key=lambda each: (-each.blocks * len(each.members), each.members)):
        at = max(map(busy.__getitem__, settlement.members))
        if at == len(rounds):
            rounds.append([])
        rounds[at].append(settlement)
        busy.update(dict.fromkeys(settlement.members, at + 1))
    return rounds
