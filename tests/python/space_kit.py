"""Small spaces and layouts of whole units, for tests."""

from __future__ import annotations

from typing import Any

from kit import BLOCK, prompt

import kvpool
from kvpool import HBM, KVLayout, RawLayout, Space

__all__ = ["UNIT", "comb", "fill", "layered", "layers_of", "layout", "space_of"]

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


def layered(layers: int, units: int = 1) -> KVLayout:
    """A layout whose layers have so many units each."""
    return KVLayout(layers, 2 * units, 64, "float32", BLOCK)


def comb(pool: Any, units: int, medium: kvpool.Medium = HBM) -> Any:
    """Leaves every other unit of a tier free. Returns the blocks of one unit between them."""
    addrs = pool.alloc(units, medium=medium)
    at = kvpool.block_ids(addrs) % 2 == 0
    pool.free(addrs[at])
    return addrs[~at]


def layers_of(pool: Any, addrs: Any) -> list[list[Any]]:
    """A view of each layer of each block, whether or not the pool's blocks may lie in pieces. All are in one medium."""
    medium = kvpool.media(addrs)[0]
    try:
        view = pool.pages(medium).numpy()
    except (AttributeError, kvpool.StateError):
        view = pool.tensor(medium).numpy()
        return [list(view[block]) for block in kvpool.block_ids(addrs)]
    return [[view[unit] for unit in units] for units in pool.block_table(addrs).T]
