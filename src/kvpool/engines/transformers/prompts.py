"""The prompts of a batch, and how much of a padded batch may be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError

__all__ = ["Prompts"]


class Prompts(NamedTuple):
    """Rows of a batch whose prompts end at the same position.

    Attributes:
        rows: Token ids of each, int32, without padding.
        padding: Positions before each.
    """

    rows: Sequence[npt.NDArray[np.int32]]
    padding: Sequence[int]

    @classmethod
    def of(cls, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]) -> Prompts:
        """Takes a batch apart.

        Args:
            ids: [row, token].
            mask: The same shape: False for padding.

        Raises:
            ArgumentError: A row has padding after its first token, or no token.
        """
        padding = []
        for number, row in enumerate(mask):
            first = int(np.argmax(row)) if row.any() else len(row)
            if first == len(row) or not row[first:].all():
                raise ArgumentError(
                    f"row {number}: its attention mask must be zeros, for padding on the left, and then ones"
                )
            padding.append(first)
        return cls([ids[number, first:] for number, first in enumerate(padding)], padding)

    def common(self, hits: Sequence[int]) -> int:
        """Positions [0, n) that every row has: its padding, and then tokens of which `hits` are cached."""
        ends = [padding + hit for padding, hit in zip(self.padding, hits, strict=True)]
        return min(ends) if any(hits) else 0
