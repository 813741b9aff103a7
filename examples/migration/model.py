"""The tiny transformer that all instances run, and what it answers without any instance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from llama import Llama, LlamaConfig, PagedKV

import kvpool

__all__ = ["BLOCK", "answer", "block_ids", "layout", "model", "next_token"]

BLOCK: Final = 16  # tokens
_CONFIG: Final = LlamaConfig(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, block_tokens=BLOCK, tokens_max=2048
)


@lru_cache(maxsize=1)
def model() -> Llama:
    """One for each process; all have equal weights."""
    torch.set_num_threads(1)  # several processes share the processors
    return Llama(_CONFIG)


def layout() -> kvpool.KVLayout:
    """Of the blocks."""
    c = _CONFIG
    return kvpool.KVLayout(c.layers, c.kv_heads, c.head_dim, "float32", c.block_tokens)


def block_ids(addresses: npt.NDArray[np.uint64]) -> torch.Tensor:
    """Which blocks of the pool's tensor these are."""
    return torch.from_numpy(kvpool.block_ids(addresses).astype("int64"))


def next_token(tokens: Sequence[int], kv: PagedKV, ids: torch.Tensor, first_block: int) -> int:
    """Computes the tiles from `first_block` to the end, and returns the likeliest next token."""
    blocks = -(-len(tokens) // BLOCK)
    return int(model().forward(torch.tensor(tokens), kv, ids[:blocks], first_block).argmax())


def answer(prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What a request gets that is computed alone, in one place."""
    c = _CONFIG
    blocks = -(-(len(prompt) + new_tokens) // BLOCK)
    kv = PagedKV(torch.zeros(blocks, c.layers, 2, c.kv_heads, BLOCK, c.head_dim))
    ids = torch.arange(blocks)
    tokens = list(prompt)
    tokens.append(next_token(tokens, kv, ids, 0))
    while len(tokens) < len(prompt) + new_tokens:
        tokens.append(next_token(tokens, kv, ids, (len(tokens) - 1) // BLOCK))
    return tokens[len(prompt) :]
