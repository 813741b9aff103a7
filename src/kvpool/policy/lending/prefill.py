"""Where the blocks of a new prompt go if it does not fit at home: early ones stay, later ones go to creditors.

Each chunk of the prompt attends to all chunks before it, so the early ones are read most often: they lie at home. The
last blocks do too, because tokens are written there. What lies between goes in whole leaves (see offload.py), through a
few blocks at home into which chunk after chunk is computed while the one before is on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of
from kvpool.policy.lending.offload import LEAF_BLOCKS

__all__ = ["Away", "PrefillPlan", "plan_prefill"]


@dataclass(frozen=True)
class Away:
    """Blocks [first, first + blocks) of the prompt go to a creditor."""

    first: int
    blocks: int
    creditor: int


@dataclass(frozen=True)
class PrefillPlan:
    """Where the blocks of a prompt go.

    Attributes:
        blocks: All of them.
        away: Those that go to creditors, ascending. The others stay at home.
        staging: So many blocks at home are needed beside those that stay, until all have gone.
        missing: How many blocks neither stay nor go: then the rest of the plan is void.
    """

    blocks: int
    away: tuple[Away, ...]
    staging: int
    missing: int

    @property
    def home(self) -> int:
        """How many blocks stay at home."""
        return self.blocks - sum(part.blocks for part in self.away)


def plan_prefill(
    blocks: int, free: int, room: Mapping[int, int], chunk: int, leaf: int = LEAF_BLOCKS, tail: int = LEAF_BLOCKS
) -> PrefillPlan:
    """Which blocks of a new prompt stay at home, and which go where.

    As many whole leaves as possible stay, from the first on, and the tail. The fewest creditors that suffice get the
    rest, the one with most room first, in whole leaves; where a creditor has less room than a leaf, in aligned groups
    of half the size, and so on. No creditor gets more than its room.

    Args:
        blocks: Of the prompt, the begun one included.
        free: At home.
        room: What each creditor lends.
        chunk: Blocks that are computed at a time. Two chunks are staged: one is computed while the other is sent.
        leaf: Blocks of a leaf, a power of two.
        tail: So many last blocks stay at home, and what fills the last leaf before them up; at least 1.

    Raises:
        ArgumentError: `leaf` is no power of two, or a number is out of range.
    """
    count_of(blocks, "the blocks of the prompt", 1)
    count_of(free, "the free blocks at home", 0)
    count_of(chunk, "the blocks of a chunk", 1)
    count_of(tail, "the blocks of a tail", 1)
    if count_of(leaf, "the blocks of a leaf", 1) & (leaf - 1):
        raise ArgumentError(f"a leaf of {leaf} blocks: not a power of two")
    left = {creditor: count_of(n, f"the room at {creditor}", 0) for creditor, n in sorted(room.items())}
    if blocks <= free:
        return PrefillPlan(blocks, (), 0, 0)
    end = max(0, blocks - tail) // leaf * leaf  # what may go ends here
    staging = 2 * min(chunk, end)
    begin = max(0, free - staging - (blocks - end)) // leaf * leaf
    lacking = blocks - (end - begin) + staging - free  # if even all that may go does not make it fit
    if lacking > 0:
        return PrefillPlan(blocks, (), staging, lacking)
    away: list[Away] = []
    at = begin
    while at < end and any(left.values()):
        creditor = max(left, key=lambda each: (left[each], -each))
        size = min(_group(at, left[creditor], leaf), end - at)
        _add(away, Away(at, size, creditor))
        left[creditor] -= size
        at += size
    return PrefillPlan(blocks, tuple(away), staging, end - at)


def _group(at: int, room: int, leaf: int) -> int:
    """How many blocks from `at` on a creditor takes: whole leaves, or else the largest aligned group that fits."""
    if at % leaf == 0 and room >= leaf:
        return room // leaf * leaf
    aligned = leaf if at == 0 else min(leaf, at & -at)
    return min(aligned, 1 << (room.bit_length() - 1))


def _add(away: list[Away], part: Away) -> None:
    """Joins it with the last one where both go to one creditor."""
    if away and away[-1].creditor == part.creditor:
        last = away.pop()
        part = Away(last.first, last.blocks + part.blocks, part.creditor)
    away.append(part)
