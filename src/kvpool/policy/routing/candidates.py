"""What the trees say of one prompt, as arrays over the instances of a load board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.policy.routing.load import Floats, LoadBoard
from kvpool.policy.routing.tree import Ints, PromptTree
from kvpool.policy.routing.types import Holder

__all__ = ["Candidates", "Tokens"]

Tokens = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_NONE = np.empty(0, dtype=np.int64)


class Candidates(NamedTuple):
    """Who holds how much of a prompt.

    Attributes:
        hits: Slots of those that hold some of it, the longest first.
        lengths: The different lengths that are held, the longest first, and 0.
        bounds: Where in `hits` each of these lengths begins, and their end.
        cached: How much each holds, for every slot of the board.
    """

    hits: Ints
    lengths: list[int]
    bounds: list[int]
    cached: Ints

    @classmethod
    def find(cls, trees: Sequence[PromptTree], board: LoadBoard, tokens: Tokens, namespace: str) -> Candidates:
        """Asks the trees of all kinds of instance that stand on the board."""
        matches = [tree.match(tokens, namespace) for tree in trees]
        instances, held = matches[0] if matches else (_NONE, _NONE)
        if len(matches) > 1:
            instances, held = (np.concatenate(parts) for parts in zip(*matches, strict=True))
            order = np.argsort(-held, kind="stable")
            instances, held = instances[order], held[order]
        hits = board.slots(instances)
        cached = np.zeros(len(board), dtype=np.int64)
        if not len(hits):
            return cls(hits, [0], [0], cached)
        if hits.min() < 0:  # a tree that somebody else feeds may know an instance that has left, or is not here yet
            hits, held = hits[hits >= 0], held[hits >= 0]
        cached[hits] = held
        changes = (held[1:] != held[:-1]).nonzero()[0].tolist()  # sorted, so equal ones are neighbours
        starts = [0, *(at + 1 for at in changes)] if len(held) else []
        return cls(hits, [*(int(held[at]) for at in starts), 0], [*starts, len(held)], cached)

    def spread(self, values: Floats) -> Floats:
        """From a value for each of `lengths` to one for each slot."""
        spread = np.full(len(self.cached), values[-1])
        for value, start, stop in zip(values.tolist(), self.bounds, self.bounds[1:], strict=False):
            spread[self.hits[start:stop]] = value
        return spread

    def holders(self, ids: Ints, load: Floats, cached: int, room: int) -> list[Holder]:
        """At most `room` of those that hold more than `cached`: the longest first, of equals the least loaded."""
        holders: list[Holder] = []
        for held, start, stop in zip(self.lengths, self.bounds, self.bounds[1:], strict=False):
            left = room - len(holders)
            if held <= cached or left <= 0:
                break
            slots = self.hits[start:stop]
            if len(slots) > left:
                slots = slots[load[slots].argpartition(left - 1)[:left]]
            ranked = sorted(zip(load[slots].tolist(), ids[slots].tolist(), strict=True))
            holders += [Holder(instance, cached, held) for _, instance in ranked]
        return holders
