"""Blocks and their memory: what `Pool.tensor`, `Pool.swap_in` and `Pool.swap_out` return."""

from kvpool._core import KVTensor, SwappedIn
from kvpool.alloc.swap import SwapIn, SwapOut

__all__ = ["KVTensor", "SwapIn", "SwapOut", "SwappedIn"]
