"""How an engine uses kvpool: match, fill the gap, decode, insert, release.

One request at a time, to keep it readable. The life of a request's blocks:

    tokens   | cached prefix         | rest of the prompt | generated |
    blocks   | match into HBM        | alloc (active)     | alloc     |
             | (pinned)              | prefill writes     | decode writes
    at end   | insert: full blocks become historical      | the last, partial block is freed

Cached blocks are shared and immutable: the engine reads them and never writes them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from llama import Llama, LlamaConfig, PagedKV
from torch.utils.dlpack import from_dlpack

import kvpool

Tokens = npt.NDArray[np.int32]
Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Served:
    """What a request got, and what it cost."""

    tokens: list[int]  # generated
    logits: torch.Tensor  # [generated, vocab]: what each was chosen from
    prompt_tokens: int
    cached_tokens: int  # of the prompt, not prefilled
    swapped_in_blocks: int
    ttft_s: float  # time to first token
    decode_s: float  # time of the tokens after it


def kv_layout(config: LlamaConfig) -> kvpool.KVLayout:
    return kvpool.KVLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        block_tokens=config.block_tokens,
    )


class Engine:
    """Serves prompts greedily on one pool. The pool is the caller's; `cache=False` neither matches nor inserts."""

    def __init__(self, model: Llama, pool: kvpool.Pool, *, cache: bool = True) -> None:
        self._model = model
        self._pool = pool
        self._cache = cache
        # Zero copy: the model's reads and writes of this tensor are reads and writes of the pool's blocks.
        self._kv = PagedKV(from_dlpack(pool.tensor(kvpool.HBM)))

    def serve(self, prompt: Tokens, new_tokens: int) -> Served:
        """Generates exactly `new_tokens` tokens (there is no end token to wait for: the model is untrained).

        Raises kvpool.OutOfBlocks when HBM is too small for this one sequence; the pool is then as it was before, but
        for what was evicted.
        """
        if not len(prompt) or new_tokens < 1:
            raise ValueError(f"need a prompt and something to generate, got {len(prompt)} and {new_tokens} tokens")
        size = self._model.config.block_tokens
        start = first_token_at = time.perf_counter()
        sequence = np.concatenate([prompt, np.zeros(new_tokens, np.int32)], dtype=np.int32)
        known = len(prompt)  # tokens of `sequence` that are there already
        logits: list[torch.Tensor] = []
        with ExitStack() as pins:
            table, swapped_in = self._cached_prefix(prompt, pins)
            cached = computed = len(table)  # blocks whose K and V are final
            active = table[cached:]  # blocks that are ours to free
            try:
                while True:
                    missing = -(-known // size) - len(table)
                    if missing > 0:
                        fresh = self._pool.alloc(missing)
                        table, active = np.concatenate([table, fresh]), np.concatenate([active, fresh])
                    logits.append(self._forward(sequence[:known], table, computed))
                    computed = known // size
                    sequence[known] = int(logits[-1].argmax())
                    known += 1
                    if len(logits) == 1:
                        first_token_at = time.perf_counter()
                    if len(logits) == new_tokens:
                        break
                finished_at = time.perf_counter()
                if self._cache:
                    # The last token was never an input, so it has no K and V: `computed` blocks are full, not more.
                    with self._pool.insert(sequence[: computed * size], table[:computed], free_duplicates=True):
                        active = table[computed:]
            finally:
                self._pool.free(active)
        return Served(
            tokens=sequence[len(prompt) :].tolist(),
            logits=torch.stack(logits),
            prompt_tokens=len(prompt),
            cached_tokens=cached * size,
            swapped_in_blocks=swapped_in,
            ttft_s=first_token_at - start,
            decode_s=finished_at - first_token_at,
        )

    def _cached_prefix(self, prompt: Tokens, pins: ExitStack) -> tuple[Addresses, int]:
        """Addresses in HBM of the cached blocks of `prompt`, and how many came from DRAM. Valid while `pins` is open.

        Asks for all tokens but the last: its logits are wanted, so it must be computed even if the whole prompt is
        cached. Then the last block is computed again, into a block of our own; insert finds it a duplicate.
        """
        if not self._cache:
            return np.empty(0, np.uint64), 0
        before = self._pool.stats().swapped_in_blocks
        hit = pins.enter_context(self._pool.match(prompt[:-1], into=kvpool.HBM))
        return hit.addrs, self._pool.stats().swapped_in_blocks - before

    def _forward(self, tokens: Tokens, table: Addresses, first_block: int) -> torch.Tensor:
        block_ids = torch.from_numpy(kvpool.block_ids(table))
        return self._model.forward(torch.from_numpy(tokens), self._kv, block_ids, first_block)
