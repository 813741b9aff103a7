"""What the trees say of one prompt: who of a load board holds how much of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.policy.routing.load import Floats, LoadBoard
from kvpool.policy.routing.tree import Ints, PromptTree
from kvpool.policy.routing.types import Holder

__all__ = ["FEW", "Candidates", "Tokens"]

Tokens = npt.NDArray[np.int32] | npt.NDArray[np.int64]

FEW: Final = 64  # so many are looked at one by one; of more, arrays are made


class Candidates:
    """Who holds how much of a prompt.

    Args:
        slots: Of those that hold some of it, the longest first.
        lengths: The different lengths that are held, the longest first, and 0.
        bounds: Where in `slots` each of these lengths begins, and their end.
        size: Of the board.
    """

    __slots__ = ("_at", "bounds", "lengths", "slots")

    def __init__(self, slots: list[int] | Ints, lengths: list[int], bounds: list[int], size: int) -> None:
        self.slots, self.lengths, self.bounds = slots, lengths, bounds
        self._at: dict[int, int] | npt.NDArray[np.int16]  # the place in `lengths`, by slot
        if len(slots) <= FEW:
            self._at = {}
            for at in range(len(bounds) - 1):
                self._at.update(dict.fromkeys(slots[bounds[at] : bounds[at + 1]], at))
        else:
            self._at = np.full(size, len(lengths) - 1, dtype=np.int16)
            for at in range(len(bounds) - 1):
                self._at[slots[bounds[at] : bounds[at + 1]]] = at

    @classmethod
    def find(cls, trees: Sequence[PromptTree], board: LoadBoard, tokens: Tokens, namespace: str) -> Candidates:
        """Asks the trees of all kinds of instance that stand on the board."""
        if not trees:
            return cls([], [0], [0], len(board))
        matches = [tree.match(tokens, namespace) for tree in trees]
        instances, held = matches[0]
        if len(matches) > 1:
            instances, held = (np.concatenate(parts) for parts in zip(*matches, strict=True))
            order = np.argsort(-held, kind="stable")
            instances, held = instances[order], held[order]
        if len(instances) <= FEW:
            return cls._of_few(board, instances, held)
        slots = board.slots(instances)
        if len(slots) and slots.min() < 0:  # a tree that somebody else feeds may know one that has left, or comes yet
            slots, held = slots[slots >= 0], held[slots >= 0]
        lengths, bounds, rising = [], [0], held[::-1]
        while bounds[-1] < len(slots):
            lengths.append(int(held[bounds[-1]]))
            bounds.append(len(slots) - int(rising.searchsorted(lengths[-1])))
        lengths.append(0)
        return cls(slots.tolist() if len(slots) <= FEW else slots, lengths, bounds, len(board))

    @classmethod
    def _of_few(cls, board: LoadBoard, instances: Ints, held: Ints) -> Candidates:
        """As `find`, without arrays, which take longer for few."""
        slots: list[int] = []
        lengths: list[int] = []
        bounds: list[int] = []
        for slot, length in zip(board.slots(instances).tolist(), held.tolist(), strict=True):
            if slot >= 0:
                if not lengths or length != lengths[-1]:
                    lengths.append(length)
                    bounds.append(len(slots))
                slots.append(slot)
        return cls(slots, [*lengths, 0], [*bounds, len(slots)], len(board))

    def at(self, slot: int) -> int:
        """What one of the board holds, as a place in `lengths`."""
        if isinstance(self._at, dict):
            return self._at.get(slot, len(self.lengths) - 1)
        return int(self._at[slot])

    def without(self, slots: Iterable[int]) -> Ints:
        """Those of these slots that hold nothing."""
        if isinstance(self._at, dict):
            return np.array([slot for slot in slots if slot not in self._at], dtype=np.int64)
        some: Ints = np.fromiter(slots, dtype=np.int64)
        none: Ints = some[self._at[some] == len(self.lengths) - 1]
        return none

    def spread(self, values: Sequence[float], size: int) -> Floats:
        """From a value for each of `lengths` to one for each of the `size` slots of the board."""
        spread = np.full(size, values[-1], dtype=np.float64)
        for value, start, stop in zip(values, self.bounds, self.bounds[1:], strict=False):
            spread[self.slots[start:stop]] = value
        return spread

    def holders(self, board: LoadBoard, now: float, cached: int, room: int) -> list[Holder]:
        """At most `room` of those that hold more than `cached`: the longest first, of equals the least loaded."""
        holders: list[Holder] = []
        for held, start, stop in zip(self.lengths, self.bounds, self.bounds[1:], strict=False):
            left = room - len(holders)
            if held <= cached or left <= 0:
                break
            slots = self.slots[start:stop]
            if len(slots) == 1:
                ranked = [(0.0, board.id_of(int(slots[0])))]
            elif len(slots) <= FEW:
                ranked = sorted((board.load_of(int(slot), now), board.id_of(int(slot))) for slot in slots)[:left]
            else:
                some: Ints = np.asarray(slots)
                load = board.load(now, some)
                if len(some) > left:
                    least = load.argpartition(left - 1)[:left]
                    some, load = some[least], load[least]
                ranked = sorted(zip(load.tolist(), board.ids[some].tolist(), strict=True))
            holders += [Holder(instance, cached, held) for _, instance in ranked]
        return holders
