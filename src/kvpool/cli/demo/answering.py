"""A small engine: a decoder in NumPy whose keys and values are in the blocks of a pool."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.alloc import block_ids
from kvpool.config import Settings
from kvpool.control.numpy_rank import NumpyRank
from kvpool.policy.cost import ModelShape
from kvpool.pool import Pool
from kvpool.types import KVLayout

__all__ = ["LAYOUT", "SHAPE", "Answer", "Engine", "make_pool", "prompts", "times_sooner"]

SHAPE: Final = ModelShape(layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=4096)
LAYOUT: Final = KVLayout(
    layers=SHAPE.layers, kv_heads=SHAPE.kv_heads, head_dim=SHAPE.head_dim, dtype="float32", block_tokens=16
)
SHARED: Final = 768  # tokens that all prompts begin with: instructions, examples, tools
OWN: Final = 40  # of each question
ANSWER: Final = 8
TOKENS_MAX: Final = SHARED + OWN + ANSWER
BLOCKS: Final = -(-TOKENS_MAX // LAYOUT.block_tokens)

Tokens = npt.NDArray[np.int64]


class Answer(NamedTuple):
    """One answered request."""

    tokens: tuple[int, ...]
    cached: int  # tokens of the prompt that needed no computing
    first_s: float  # to the first token


def prompts(count: int) -> list[Tokens]:
    """So many prompts, with one beginning; the same in every process."""
    random = np.random.default_rng(7)
    shared = random.integers(0, SHAPE.vocab, SHARED)
    return [np.concatenate([shared, random.integers(0, SHAPE.vocab, OWN)]) for _ in range(count)]


def make_pool(name: str) -> Pool:
    """A pool of the demo. Explicit, so that no setting of the environment changes names, routes or what is lent."""
    return Pool(
        LAYOUT, hbm_blocks=6 * BLOCKS, name=name, huge_pages="never", routes=(), lend_max=Settings.lend_max
    )  # fmt: skip


def times_sooner(faster: float) -> str:
    """The comparison of two times to the first token, in words."""
    if faster < 1:
        return f"{1 / faster:.1f} times later: the cache does not pay on this machine now"
    return f"{faster:.1f} times sooner"


class Engine:
    """Answers prompts one after the other, greedily. Its weights are the same in every process.

    Args:
        pool: Of LAYOUT, with HBM for one sequence and what is to be cached.
        caches: False: every prompt is computed from its first token.
    """

    def __init__(self, pool: Pool, caches: bool) -> None:
        self._pool, self._caches = pool, caches
        self._model = NumpyRank(SHAPE, TOKENS_MAX, block_tokens=LAYOUT.block_tokens)
        self._kv = pool.tensor().numpy()

    def warm(self) -> None:
        """The first multiplications of a process take longer, and the first use of its memory does."""
        addrs = self._pool.alloc(BLOCKS)
        self._model.use(self._kv, block_ids(addrs))
        for tokens in (SHARED + OWN, OWN):
            self._model.prefill(np.arange(tokens))
        self._pool.free(addrs)
        for _ in range(2):  # with a cache, computed and found
            self.answer(np.arange(SHARED + OWN))

    def answer(self, prompt: Tokens) -> Answer:
        """Finds what is cached of the prompt, computes the rest, and caches it."""
        began = time.perf_counter()
        whole = len(prompt) // LAYOUT.block_tokens
        # The last token is computed in any case, because its logits are wanted.
        with self._pool.match(prompt[: len(prompt) - 1] if self._caches else prompt[:0]) as hit:
            own = self._pool.alloc(BLOCKS - len(hit.addrs))
            self._model.use(self._kv, block_ids(np.concatenate([hit.addrs, own])))
            cached = hit.tokens
            tokens, first_s = self._decode(prompt, cached, began)
            inserted = whole - len(hit.addrs) if self._caches else 0
            if inserted > 0:
                addrs = np.concatenate([hit.addrs, own[:inserted]])
                self._pool.insert(prompt[: whole * LAYOUT.block_tokens], addrs, free_duplicates=True).close()
            self._pool.free(own[max(inserted, 0) :])
        return Answer(tokens, cached, first_s)

    def _decode(self, prompt: Tokens, cached: int, began: float) -> tuple[tuple[int, ...], float]:
        sequence = prompt
        first_s = 0.0
        for number in range(ANSWER):
            logits = self._model.prefill(sequence, cached)
            cached = len(sequence)
            sequence = np.append(sequence, int(logits[-1].argmax()))
            if number == 0:
                first_s = time.perf_counter() - began
        return tuple(int(one) for one in sequence[len(prompt) :]), first_s
