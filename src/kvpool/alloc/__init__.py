"""Blocks and their memory: the results of `Pool.tensor`, `Pool.swap_in`, `Pool.swap_out` and `Pool.stats`."""

from kvpool._core import KVTensor, SwappedIn
from kvpool.alloc.stats import ArenaInfo, MediumStats, PoolStats
from kvpool.alloc.swap import BlockCopy, SwapIn, SwapOut

__all__ = ["ArenaInfo", "BlockCopy", "KVTensor", "MediumStats", "PoolStats", "SwapIn", "SwapOut", "SwappedIn"]
