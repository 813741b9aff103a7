"""Which blocks are worth writing to a store. Pure; called by one thread at a time.

What is computed once and never asked for again is most of what a cache stores, and writing it wears out a drive. The
idea is that of S3-FIFO's and TinyLFU's admission: remember the names of what was seen once, and keep what comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from kvpool.errors import ArgumentError

__all__ = ["Admission", "Always", "OnSecondUse"]


class Admission(Protocol):
    """An admission policy. `keys` are the content keys of a prompt's blocks, from its first on."""

    def stored(self, keys: Sequence[bytes], first: int) -> list[int]:
        """The pool has stored the blocks from `first` on. Returns the positions of blocks to save now."""

    def used(self, keys: Sequence[bytes]) -> list[int]:
        """A request has asked for these blocks, and the pool had them. Returns the positions of blocks to save now."""

    def not_saved(self, keys: Sequence[bytes]) -> None:
        """The store does not have these: they were to be saved and were not, or it has lost them.

        They may be returned again. Some of them may be in the store all the same, or may never have been seen.
        """


class Always:
    """Everything that the pool stores."""

    def stored(self, keys: Sequence[bytes], first: int) -> list[int]:
        """All of them."""
        return list(range(first, len(keys)))

    def used(self, keys: Sequence[bytes]) -> list[int]:
        """Nothing: it was saved when it was stored."""
        return []

    def not_saved(self, keys: Sequence[bytes]) -> None:
        """Remembers nothing."""


class OnSecondUse:
    """What was used twice.

    Three things count as a use.

    - A block is stored: computed, or brought from elsewhere. Stored again after it was evicted, it was needed twice.
    - A request asks for it and the pool has it (`Storage.load`).
    - A prompt branches off behind it: two prompts that go on differently have used what they share. A prompt that only
      becomes longer, as its answer is generated, is still the first use.

    Args:
        remembered: Blocks whose names are remembered, about 250 bytes each; the longest unused are forgotten.
    """

    def __init__(self, remembered: int = 1 << 17) -> None:
        if remembered < 1:
            raise ArgumentError(f"remembered is {remembered}; it must be at least 1", value=remembered)
        self._remembered = remembered
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()

    def stored(self, keys: Sequence[bytes], first: int) -> list[int]:
        """Those that were stored before; and what they follow, if another prompt went on from there differently."""
        branches = first > 0 and self._branches(keys[first - 1], keys[first] if first < len(keys) else None)
        chosen = self._use(keys, 0, first) if branches else []
        chosen += self._use(keys, first, len(keys))
        for position in range(max(first, 1), len(keys)):
            before = self._seen.get(keys[position - 1])
            if before is not None and before.next is None:
                before.next = keys[position]
        return chosen

    def used(self, keys: Sequence[bytes]) -> list[int]:
        """Those that were seen before."""
        return self._use(keys, 0, len(keys))

    def not_saved(self, keys: Sequence[bytes]) -> None:
        """Their next use counts as a second one again."""
        for key in keys:
            seen = self._seen.get(key)
            if seen is not None:
                seen.chosen = False

    def _use(self, keys: Sequence[bytes], begin: int, end: int) -> list[int]:
        chosen = []
        for position in range(begin, end):
            seen = self._seen.get(keys[position])
            if seen is None:
                self._seen[keys[position]] = _Seen()
                continue
            self._seen.move_to_end(keys[position])
            if not seen.chosen:
                seen.chosen = True
                chosen.append(position)
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return chosen

    def _branches(self, parent: bytes, child: bytes | None) -> bool:
        seen = self._seen.get(parent)
        return seen is not None and seen.next is not None and child is not None and seen.next != child


class _Seen:
    """A block that was used once, at least."""

    __slots__ = ("chosen", "next")

    def __init__(self) -> None:
        self.chosen = False
        self.next: bytes | None = None
