"""The kinds of memory that blocks lie in."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["DISK", "DRAM", "HBM", "MIXED", "Medium"]


class Medium(IntEnum):
    """A kind of memory for blocks. Blocks on `DISK` cannot be allocated: what is evicted goes there."""

    HBM = 1
    DRAM = 2
    DISK = 3


HBM: Final = Medium.HBM
DRAM: Final = Medium.DRAM
DISK: Final = Medium.DISK
MIXED: Final = 8
"""Where a verb takes a medium to place blocks in: HBM first, the rest DRAM. No medium, so no address has it."""
