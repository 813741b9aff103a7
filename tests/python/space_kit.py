"""Small spaces and layouts of whole units, for tests."""

from __future__ import annotations

from typing import Any

from kit import BLOCK, prompt

import kvpool
from kvpool import RawLayout, Space

__all__ = ["UNIT", "fill", "layout", "space_of"]

UNIT = 4 << 10


def layout(units: int, bytes_less: int = 0) -> RawLayout:
    return RawLayout(units * UNIT - bytes_less, BLOCK)


def space_of(hbm: int = 24, dram: int = 12, **arguments: Any) -> Space:
    arguments = {"huge_pages": "never", "audit": True} | arguments
    return Space(hbm * UNIT, dram * UNIT, **arguments)


def fill(pool: kvpool.Pool, blocks: int, name: int = 0) -> None:
    """Caches prompts of a block each, unpinned."""
    for at in range(blocks):
        pool.insert(prompt(1, 1000 * name + at + 1), pool.alloc(1)).close()
