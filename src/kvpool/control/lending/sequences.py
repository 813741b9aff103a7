"""Which blocks of which sequences lie where: at home, and with creditors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvpool.control.lending.pools import LentSequence
from kvpool.policy import lending
from kvpool.types import Medium
from kvpool.types.addresses import AddressLike, instances, media

__all__ = ["Borrowing"]


class Borrowing:
    """The sequences of a pool that have blocks with creditors, and since when. One thread at a time may call.

    Args:
        instance: Of the pool.
        medium: Only blocks of it go to creditors.
        block_tokens: Tokens of a block.
    """

    def __init__(self, instance: int, medium: Medium, block_tokens: int) -> None:
        self._own = instance
        self._medium = medium
        self._block_tokens = block_tokens
        self._sequences: dict[int, LentSequence] = {}  # by id(): they stay alive here
        self._since: dict[tuple[int, int], int] = {}  # by sequence and creditor
        self._loans = 0
        self._new: deque[LentSequence] = deque()  # that were noted without waiting for a turn

    def held(self, sequence: LentSequence) -> lending.Held:
        """What of a sequence lies at home in the medium, as far as tokens are written."""
        owners = self._owners(sequence)
        begun = min(len(owners), -(-sequence.tokens // self._block_tokens))
        at_home = (owners == 0) & (media(sequence.addrs) == self._medium)
        home = [(first, end) for first, end in _runs(at_home[:begun]) if at_home[first]]
        return lending.Held(id(sequence), begun, home, sorted({int(owner) for owner in owners if owner}))

    def note_soon(self, sequence: LentSequence) -> None:
        """As `note`, when loans are asked for next. Any thread, at any time."""
        self._new.append(sequence)

    def note(self, sequence: LentSequence) -> None:
        """Remembers where the blocks of a sequence lie now."""
        creditors = {int(owner) for owner in self._owners(sequence) if owner}
        if not creditors:
            self._forget(id(sequence))
            return
        self._sequences[id(sequence)] = sequence
        for creditor in sorted(creditors):
            if (id(sequence), creditor) not in self._since:
                self._loans += 1
                self._since[id(sequence), creditor] = self._loans

    def sequence(self, name: object) -> LentSequence:
        """The sequence of a loan."""
        assert isinstance(name, int)
        return self._sequences[name]

    def loans(self, among: AddressLike | None = None) -> list[lending.Loan]:
        """All loans of sequences that have not ended, or those of some blocks only.

        Forgets sequences that have ended, or that have nothing lent any more.
        """
        found = []
        while self._new:
            self.note(self._new.popleft())
        for name, sequence in list(self._sequences.items()):
            if sequence.closed:
                self._forget(name)
                continue
            self.note(sequence)
            owners = self._owners(sequence)
            if among is not None:
                owners[~np.isin(sequence.addrs, np.asarray(among, np.uint64))] = 0
            for first, end in _runs(owners):
                if creditor := int(owners[first]):
                    found.append(lending.Loan(name, creditor, first, end - first, self._since[name, creditor]))
        return found

    def _owners(self, sequence: LentSequence) -> npt.NDArray[np.int64]:
        """The instance that has each block; 0 for this pool."""
        owners = instances(sequence.addrs)
        owners[owners == self._own] = 0
        return owners

    def _forget(self, name: int) -> None:
        self._sequences.pop(name, None)
        for key in [key for key in self._since if key[0] == name]:
            del self._since[key]


def _runs(values: npt.NDArray[np.generic]) -> Iterator[tuple[int, int]]:
    """Ranges [first, end) of equal values."""
    if len(values):
        cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
        yield from pairwise(cuts)
