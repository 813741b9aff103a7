"""Blocks and their memory: what `Pool.tensor` and `Pool.swap_in` return."""

from kvpool._core import KVTensor, SwappedIn

__all__ = ["KVTensor", "SwappedIn"]
