"""The blocks of a rank's memory by their numbers, for copies between its media."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.pool import Pool
from kvpool.types import DRAM, HBM, Medium, checked_block_ids

__all__ = ["RankBlocks"]


class RankBlocks:
    """The addresses of all blocks in the pool below a rank, which only provides memory. Thread-safe.

    That pool never frees a block, so a number has one address. The scheduler's pool has other addresses for them.
    """

    def __init__(self, memory: Pool) -> None:
        """Takes all blocks of the pool."""
        stats = memory.stats()
        self._addresses = {
            medium: _by_number(memory.alloc(blocks, medium=medium))
            for medium, blocks in ((HBM, stats.hbm.capacity), (DRAM, stats.dram.capacity))
        }

    def other_than(self, medium: object) -> Medium:
        """The medium that a copy into this one reads.

        Raises:
            ArgumentError, ArgumentTypeError: It is neither HBM nor DRAM.
        """
        number = int_from(medium, "medium, kvpool.HBM or kvpool.DRAM,")
        if number not in (HBM, DRAM):
            raise ArgumentError(
                f"medium must be kvpool.HBM (1) or kvpool.DRAM (2), and is {shown(number)}", value=number
            )
        return DRAM if number == HBM else HBM

    def addresses(self, numbers: object, medium: Medium) -> npt.NDArray[np.uint64]:
        """The addresses of the blocks with these numbers.

        Raises:
            ArgumentError: There is no such block.
            ArgumentTypeError: The numbers are not a sequence of ints.
        """
        all_of = self._addresses[medium]
        wanted = _integers(numbers)
        wrong = np.flatnonzero((wanted < 0) | (wanted >= len(all_of)))
        if len(wrong):
            block, position = int(wanted[wrong[0]]), int(wrong[0])
            raise ArgumentError(
                f"block {block} (position {position}): {medium.name} has {len(all_of)} blocks",
                block=block, position=position,
            )  # fmt: skip
        return all_of[wanted.astype(np.int64)]


def _by_number(addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    by_number = np.empty_like(addresses)
    by_number[checked_block_ids(addresses)] = addresses
    return by_number


def _integers(numbers: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(numbers)
    except Exception as error:
        raise ArgumentTypeError(f"block numbers must be a sequence of ints, not {shown(numbers)}") from error
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"block numbers must be a sequence of ints, not {shown(numbers)}")
    return array
