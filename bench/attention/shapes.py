"""What the benches of attention between pools have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16
LAYOUT: dict[str, Any] = {
    "layers": 1,
    "kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "dtype": "bfloat16",
    "block_tokens": BLOCK_TOKENS,
}
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # K and V


def filled_pool(layout: kvpool.KVLayout, blocks: int, **settings: Any) -> kvpool.Pool:
    """A pool of DRAM that was written, so that it is there, and whose numbers are ordinary."""
    pool = kvpool.Pool(layout, 0, blocks, secret="bench", **settings)
    view = pool.tensor(kvpool.DRAM).numpy()
    row = np.random.default_rng(1).uniform(-1, 1, view[0].size).astype(np.float32)
    view[:] = (row.view(np.uint32) >> 16).astype(np.uint16).reshape(view[0].shape)
    return pool


def query(pool: kvpool.Pool, heads: int, rows: int = 1) -> npt.NDArray[np.uint16]:
    """Queries in bfloat16."""
    values = np.random.default_rng(2).uniform(-1, 1, (rows, heads, HEAD_DIM)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
