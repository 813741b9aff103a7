"""Blocks and their memory: block numbers, and the results of `tensor`, `swap_in`, `swap_out` and `stats` of a pool."""

from kvpool._core import KVTensor, SwappedIn
from kvpool.alloc.block_numbers import block_ids
from kvpool.alloc.disk import DiskStats, DiskWarning
from kvpool.alloc.stats import ArenaInfo, MediumStats, NcclCost, PoolStats
from kvpool.alloc.swap import BlockCopy, SwapIn, SwapOut

__all__ = [
    "ArenaInfo",
    "BlockCopy",
    "DiskStats",
    "DiskWarning",
    "KVTensor",
    "MediumStats",
    "NcclCost",
    "PoolStats",
    "SwapIn",
    "SwapOut",
    "SwappedIn",
    "block_ids",
]
