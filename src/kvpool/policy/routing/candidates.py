"""Which instances of a load table hold how much of one prompt, according to the trees.

All of a thousand instances may hold a prompt. So the trees' answers are not copied; they are asked how much one
instance holds, and which instances hold a given length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from kvpool.index import InstanceHits
from kvpool.policy.routing.load import Floats, LoadTable
from kvpool.policy.routing.tokens import Tokens
from kvpool.policy.routing.tree import Ints, PromptTree
from kvpool.policy.routing.types import Holder

__all__ = ["FEW", "Candidates", "Values"]


class Values(Protocol):
    """A number for each length that is held of a prompt."""

    def __getitem__(self, at: int, /) -> float:
        """By its index in `Candidates.lengths`; -1 is the index of length 0."""


FEW: Final = 64  # this many are examined one by one; more, as arrays


class Candidates:
    """How much of a prompt each instance holds.

    Args:
        table: The load table. A tree that another thread feeds may know instances that have left it or not yet joined.
        found: The answer of the tree of each kind of instance; an instance is in one of them.

    Attributes:
        lengths: The different numbers of tokens that are held, the longest first, and 0.
    """

    __slots__ = ("_found", "_positions", "_table", "lengths")

    def __init__(self, table: LoadTable, found: Sequence[InstanceHits]) -> None:
        self._table = table
        self._found = [(hits, hits.bounds) for hits in found]
        self._positions: list[list[int]] = []  # of each tree's lengths in `lengths`, where there are several trees
        if len(found) == 1:
            self.lengths = found[0].lengths
        else:
            each = [hits.lengths for hits in found]
            self.lengths = sorted({length for lengths in each for length in lengths}, reverse=True)
            position = {length: at for at, length in enumerate(self.lengths)}
            self._positions = [[position[length] for length in lengths] for lengths in each]
        self.lengths.append(0)

    @classmethod
    def find(cls, trees: Sequence[PromptTree], table: LoadTable, tokens: Tokens, namespace: str) -> Candidates:
        """Asks the trees of all kinds of instances in the load table."""
        return cls(table, [tree.find(tokens, namespace) for tree in trees])

    def at(self, slot: int) -> int:
        """How much an instance of the table holds, as an index into `lengths`."""
        instance = self._table.id_of(slot)
        if not self._positions:
            return self._found[0][0].level(instance) if self._found else 0
        for (hits, _), positions in zip(self._found, self._positions, strict=True):
            level = hits.level(instance)
            if level < len(positions):
                return positions[level]
        return len(self.lengths) - 1

    def count(self, at: int) -> int:
        """How many instances hold this length, including instances outside the table."""
        if len(self._found) == 1 and not self._positions:
            bounds = self._found[0][1]
            return bounds[at + 1] - bounds[at]
        return sum(stop - start for _, start, stop in self._spans(at))

    def slots(self, at: int) -> Ints:
        """The slots of the instances that hold this length; int64."""
        parts = [self._table.slots(hits.instances(start, stop)) for hits, start, stop in self._spans(at)]
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return slots[slots >= 0]

    def few(self, at: int) -> list[int]:
        """As `slots`, quicker for few."""
        slot_of = self._table.slot_of
        ids = [each for hits, start, stop in self._spans(at) for each in hits.instances(start, stop).tolist()]
        return [slot for each in ids if (slot := slot_of(each)) >= 0]

    def spread(self, values: Values) -> Floats:
        """Maps a value for each index of `lengths` to one for each slot of the table."""
        spread = np.full(len(self._table), values[-1], dtype=np.float64)
        for at in range(len(self.lengths) - 1):
            spread[self.slots(at)] = values[at]
        return spread

    def holders(self, table: LoadTable, now: float, cached: int, room: int) -> list[Holder]:
        """At most `room` instances that hold more than `cached`: the longest first, among equals the least loaded."""
        holders: list[Holder] = []
        for at, held in enumerate(self.lengths):
            left = room - len(holders)
            if held <= cached or left <= 0:
                break
            count = self.count(at)
            if count <= FEW:
                ranked = table.ranked(self.few(at), now)
            else:
                some = self.slots(at)
                load = table.load(now, some)
                if len(some) > left:
                    least = load.argpartition(left - 1)[:left]
                    some, load = some[least], load[least]
                ranked = sorted(zip(load.tolist(), table.ids[some].tolist(), strict=True))
            holders += [Holder(instance, cached, held) for _, instance in ranked[:left]]
        return holders

    def _spans(self, at: int) -> Iterator[tuple[InstanceHits, int, int]]:
        """The range of each tree's answer with the instances that hold this length."""
        if not self._positions:
            for hits, bounds in self._found:
                yield hits, bounds[at], bounds[at + 1]
            return
        for (hits, bounds), positions in zip(self._found, self._positions, strict=True):
            if at in positions:
                level = positions.index(at)
                yield hits, bounds[level], bounds[level + 1]
