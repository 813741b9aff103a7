"""Which blocks go to creditors when memory runs short, and which come home when there is room.

Attention is computed over leaves of 1,024 tokens, merged as an aligned binary tree. A creditor that has whole leaves
returns one partial result for many of them; so whole leaves move where that is possible, and where it is not, aligned
groups of half the size, and so on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of

__all__ = [
    "LEAF_BLOCKS",
    "Held",
    "Loan",
    "Offload",
    "OffloadPlan",
    "Payback",
    "payable",
    "plan_offload",
    "plan_payback",
]

LEAF_BLOCKS: Final = 64  # 1,024 tokens in blocks of 16


@dataclass(frozen=True)
class Held:
    """A sequence, as far as it is of interest when memory runs short.

    Attributes:
        sequence: Its name.
        blocks: All blocks that it has written or begun, at home and elsewhere.
        home: Which of them lie at home: ranges [first, end) of their numbers, ascending and apart.
        creditors: Those that have others of its blocks.
    """

    sequence: Hashable
    blocks: int
    home: Sequence[tuple[int, int]]
    creditors: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Raises ArgumentError for ranges that overlap, are out of order or go beyond the sequence."""
        before = 0
        for first, end in self.home:
            if not before <= first < end <= self.blocks:
                raise ArgumentError(
                    f"sequence {self.sequence!r} of {self.blocks} blocks has ranges {self.home} at home"
                )
            before = end


@dataclass(frozen=True)
class Offload:
    """Blocks [first, first + blocks) of a sequence go to a creditor."""

    sequence: Hashable
    first: int
    blocks: int
    creditor: int


@dataclass(frozen=True)
class OffloadPlan:
    """What goes where, and how many blocks too few that makes free."""

    moves: tuple[Offload, ...]
    missing: int


@dataclass(frozen=True)
class Loan:
    """Blocks [first, first + blocks) of a sequence that lie with a creditor; `since` counts up from loan to loan."""

    sequence: Hashable
    creditor: int
    first: int
    blocks: int
    since: int

    def __post_init__(self) -> None:
        """Raises ArgumentError for blocks that no sequence has."""
        count_of(self.creditor, f"a creditor of sequence {self.sequence!r}", 1)
        count_of(self.first, f"the first block of a loan of sequence {self.sequence!r}", 0)
        count_of(self.blocks, f"the blocks of a loan of sequence {self.sequence!r}", 1)


@dataclass(frozen=True)
class Payback:
    """Blocks [first, first + blocks) of a sequence come home from a creditor."""

    sequence: Hashable
    creditor: int
    first: int
    blocks: int


def plan_offload(
    held: Iterable[Held], need: int, room: Mapping[int, int], leaf: int = LEAF_BLOCKS, tail: int = LEAF_BLOCKS
) -> OffloadPlan:
    """Which blocks go to which creditors, so that `need` blocks become free at home.

    The oldest blocks of a sequence go first, and its tail never. Sequences that have blocks elsewhere already go on
    first, then those with most blocks at home: the fewer sequences are spread, the fewer steps wait for a creditor. For
    the same reason a creditor that has blocks of the sequence is preferred to one that has most room. No creditor gets
    more than its room. Up to one leaf more than needed may go.

    Args:
        held: The sequences.
        need: How many blocks are to become free.
        room: What each creditor lends.
        leaf: Blocks of a leaf, a power of two.
        tail: So many last blocks of each sequence stay at home; at least 1.

    Raises:
        ArgumentError: `leaf` is no power of two, a number is out of range, or two sequences have one name.
    """
    count_of(need, "the blocks that are needed", 0)
    count_of(tail, "the blocks of a tail", 1)
    _check_leaf(leaf)
    left = {creditor: count_of(blocks, f"the room at {creditor}", 0) for creditor, blocks in sorted(room.items())}
    order = sorted(held, key=lambda each: (not each.creditors, -sum(end - first for first, end in each.home)))
    if len({each.sequence for each in order}) != len(order):
        raise ArgumentError("two sequences have one name: their blocks would go twice")
    using = [set(each.creditors) for each in order]
    taken: list[set[int]] = [set() for _ in order]  # blocks that go
    groups: list[tuple[int, Offload]] = []
    size = leaf
    while size and need > 0:
        for at, each in enumerate(order):
            for first in _groups(each, size, tail):
                if need <= 0 or max(left.values(), default=0) < size:
                    break
                if first in taken[at]:
                    continue
                creditor = max((c for c in left if left[c] >= size), key=lambda c: (c in using[at], left[c]))
                left[creditor] -= size
                need -= size
                using[at].add(creditor)
                taken[at].update(range(first, first + size))
                groups.append((at, Offload(each.sequence, first, size, creditor)))
        size //= 2
    return OffloadPlan(tuple(_joined(groups)), max(need, 0))


def plan_payback(
    loans: Iterable[Loan], room: int, wanted: Mapping[int, int] | None = None, leaf: int = LEAF_BLOCKS
) -> tuple[Payback, ...]:
    """Which blocks come home into so much room, never more.

    First those that creditors want back, beginning with the creditor that wants most; then the oldest loans. Of a loan
    that comes home in part the last blocks do, cut where a leaf begins where that is possible.

    Args:
        loans: The loans of this member.
        room: Free blocks at home that may be used up.
        wanted: How many blocks each creditor wants back.
        leaf: Blocks of a leaf, a power of two.

    Raises:
        ArgumentError: `leaf` is no power of two, or a number is out of range.
    """
    count_of(room, "the room at home", 0)
    _check_leaf(leaf)
    wants = {creditor: count_of(n, f"what {creditor} wants", 0) for creditor, n in (wanted or {}).items()}
    oldest = sorted(loans, key=lambda loan: loan.since)
    ends = [loan.first + loan.blocks for loan in oldest]  # what has not come home ends here
    found: dict[int, int] = {}  # where the part that comes home begins; in the order in which the parts come

    def bring(at: int, most: int) -> int:
        """Brings home at most so many blocks of a loan; how many do come."""
        begin = _cut(oldest[at].first, ends[at], min(most, room), leaf)
        blocks = ends[at] - begin
        if blocks:
            found[at] = ends[at] = begin
        return blocks

    for creditor in sorted(wants, key=lambda each: (-wants[each], each)):
        for at, loan in enumerate(oldest):
            while loan.creditor == creditor and wants[creditor] > 0:
                blocks = bring(at, -(-wants[creditor] // leaf) * leaf)
                if not blocks:
                    break
                wants[creditor] -= blocks
                room -= blocks
    for at, loan in enumerate(oldest):
        room -= bring(at, loan.blocks)
    return tuple(
        Payback(loan.sequence, loan.creditor, begin, loan.first + loan.blocks - begin)
        for loan, begin in ((oldest[at], begin) for at, begin in found.items())
    )


def payable(loans: Iterable[Loan], frozen: Mapping[int, int]) -> tuple[Loan, ...]:
    """The loans without blocks that are frozen: those of the latest loans of each creditor, and the first of a loan.

    Args:
        loans: The loans of this member.
        frozen: How many blocks each creditor's freeze covers.
    """
    oldest = sorted(loans, key=lambda loan: loan.since)
    free = {creditor: -blocks for creditor, blocks in frozen.items()}
    for loan in oldest:
        free[loan.creditor] = free.get(loan.creditor, 0) + loan.blocks
    found = []
    for loan in oldest:
        blocks = min(loan.blocks, free[loan.creditor])
        if blocks > 0:
            free[loan.creditor] -= blocks
            found.append(replace(loan, first=loan.first + loan.blocks - blocks, blocks=blocks))
    return tuple(found)


def _check_leaf(leaf: int) -> None:
    if count_of(leaf, "the blocks of a leaf", 1) & (leaf - 1):
        raise ArgumentError(f"a leaf of {leaf} blocks: not a power of two")


def _groups(held: Held, size: int, tail: int) -> Iterable[int]:
    """Where the aligned groups of this size begin that lie at home and before the tail."""
    for first, end in held.home:
        begin = -(-first // size) * size
        yield from range(begin, min(end, held.blocks - tail) - size + 1, size)


def _cut(first: int, end: int, most: int, leaf: int) -> int:
    """Where the last `most` blocks of [first, end), or fewer, begin: at a leaf, else at half of one, and so on."""
    begin = max(first, end - most)
    if begin == first:
        return begin
    while (aligned := -(-begin // leaf) * leaf) >= end and leaf > 1:
        leaf //= 2
    return min(aligned, end)


def _joined(groups: list[tuple[int, Offload]]) -> Iterable[Offload]:
    """Neighbouring groups of a sequence that go to one creditor as one move; sequences in their order."""
    last: Offload | None = None
    for _, group in sorted(groups, key=lambda each: (each[0], each[1].first)):
        if last and (last.sequence, last.creditor, last.first + last.blocks) == (
            group.sequence,
            group.creditor,
            group.first,
        ):
            last = Offload(last.sequence, last.first, last.blocks + group.blocks, last.creditor)
            continue
        if last:
            yield last
        last = group
    if last:
        yield last
