"""Where the elements of a view of a pool's memory lie."""

from __future__ import annotations

from kvpool.types import KVLayout

__all__ = ["kv_view"]


def kv_view(layout: KVLayout, blocks: int, stride: int) -> tuple[list[int], list[int]]:
    """Shape and strides (bytes) of [block, *layout.shape] over an owned arena; `stride` of aggregated blocks."""
    *pieces, first, second, dim = layout.shape  # head and token, or token and head
    row = dim * layout.itemsize
    piece = first * second * row
    # Pieces lie one after another within a block (aggregated), or each in a segment of all blocks (discrete).
    block_stride, piece_stride = (stride, piece) if layout.order == "aggregated" else (piece, piece * blocks)
    per_layer = [2 * piece_stride, piece_stride] if layout.pages == "split" else [piece_stride]
    return [blocks, *pieces, first, second, dim], [block_stride, *per_layer, second * row, row, layout.itemsize]
