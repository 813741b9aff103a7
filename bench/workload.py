"""The prompts: deterministic, made from their number, and the same for kvpool and the peers. Imports NumPy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

BLOCK_TOKENS = 16
_VOCABULARY = 128_000
_SYSTEM_PROMPTS = 100


@dataclass(frozen=True)
class Prompts:
    """Prompts that begin with one of 100 system prompts of `shared` tokens; the rest of each is its own.

    Attributes:
        tokens: Length of each.
        shared: Of these, the system prompt. Half the length is 50 % sharing.
    """

    tokens: int = 4096
    shared: int = 2048

    @property
    def blocks(self) -> int:
        return self.tokens // BLOCK_TOKENS

    @property
    def leaf_blocks(self) -> int:
        return (self.tokens - self.shared) // BLOCK_TOKENS

    def prompt(self, number: int) -> Tokens:
        tokens = np.empty(self.tokens, np.int32)
        tokens[: self.shared] = _system_prompt(number % _SYSTEM_PROMPTS, self.shared)
        tokens[self.shared :] = random_tokens(number + _SYSTEM_PROMPTS, self.tokens - self.shared)
        return tokens

    def prompts(self, first: int, count: int) -> Iterator[Tokens]:
        return map(self.prompt, range(first, first + count))


def random_tokens(seed: int, count: int) -> Tokens:
    """The first tokens of stream `seed`: splitmix64 of a counter, scaled to the vocabulary."""
    start = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & (1 << 64) - 1
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_mix(start))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x >>= np.uint64(32)
    return (x * np.uint64(_VOCABULARY) >> np.uint64(32)).astype(np.int32)


@lru_cache(maxsize=2 * _SYSTEM_PROMPTS)
def _system_prompt(group: int, count: int) -> Tokens:
    return random_tokens(group, count)


def _mix(x: int) -> int:
    """Spreads neighbouring seeds over the whole range: unmixed, stream s + 1 would be stream s one token later."""
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return x ^ x >> 29
