"""kvpool's answers to the questions of bench/api/index.py."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import kvpool
from bench.measure import no_collections, time_calls
from bench.workload import Prompts, Tokens

Values = npt.NDArray[np.uint64]

_NEW_FROM = 10**7  # numbers of prompts that were not there when the tree was built
_ROOM_PROMPTS = 4000  # that may be inserted into a pool later


class Tree(Protocol):
    """What the index alone and a pool have in common here."""

    def match(self, tokens: Any) -> kvpool.Match: ...
    def insert(self, prompt: tuple[Tokens, Values]) -> None: ...
    def evict(self, blocks: int) -> object: ...
    def values(self, count: int) -> Values:
        """So many values for blocks, of ascending blocks next to each other."""


class IndexTree:
    """The index alone; its values mean nothing to it."""

    def __init__(self) -> None:
        self.index = kvpool.PromptIndex(block_tokens=16)
        self.match = self.index.match
        self.evict = self.index.evict
        self._next = 1 << 48  # values as a pool would give them: block numbers below a medium

    def insert(self, prompt: tuple[Tokens, Values]) -> None:
        self.index.insert(*prompt).close()

    def values(self, count: int) -> Values:
        first, self._next = self._next, self._next + count
        return np.arange(first, first + count, dtype=np.uint64)


class PoolTree:
    """A pool of tiny blocks, with room for the whole tree: nothing is evicted but by `evict`."""

    def __init__(self, prompts: int, shape: Prompts) -> None:
        blocks = (prompts + 100) * shape.leaf_blocks + (_ROOM_PROMPTS + 100) * shape.blocks
        self._pool = kvpool.Pool(kvpool.RawLayout(block_bytes=16), hbm_blocks=blocks)
        self.match = self._pool.match

    def evict(self, blocks: int) -> object:
        return self._pool.evict(blocks, kvpool.HBM)

    def insert(self, prompt: tuple[Tokens, Values]) -> None:
        self._pool.insert(*prompt, free_duplicates=True).close()

    def values(self, count: int) -> Values:
        return self._pool.alloc(count)


class Subject:
    """See bench/remote.py."""

    def build(self, kind: str, prompts: int, tokens: int, shared: int) -> None:
        """Makes a tree ("index" or "pool") of the prompts 0 to `prompts` - 1."""
        self._shape = Prompts(tokens, shared)
        self._count = 0
        self._new = _NEW_FROM
        self._resident_before = _resident_bytes()
        self._tree: Tree = IndexTree() if kind == "index" else PoolTree(prompts, self._shape)
        self.grow(prompts)

    def grow(self, prompts: int) -> None:
        """Adds prompts until there are so many."""
        for number in range(self._count, prompts):
            self._tree.insert((self._shape.prompt(number), self._tree.values(self._shape.blocks)))
        self._count = prompts

    def memory(self) -> dict[str, int]:
        """What the index alone holds and takes: by the growth of this process, and by its own account."""
        assert isinstance(self._tree, IndexTree)
        index = self._tree.index
        return {
            "tokens": len(index) * index.block_tokens,
            "resident_bytes": _resident_bytes() - self._resident_before,
            "reported_bytes": index.stats()["bytes"],
        }

    def check(self) -> None:
        """That a whole prompt is found."""
        with self._tree.match(self._shape.prompt(self._count // 2)) as hit:
            if hit.tokens != self._shape.tokens or len(hit.addrs) != self._shape.blocks:
                raise AssertionError(f"{hit.tokens} tokens found of {self._shape.tokens}")

    def collect_random(self, n: int, seed: int) -> list[float]:
        return time_calls(self._match, list(self._some(n, seed)))

    def collect_same(self, n: int) -> list[float]:
        return time_calls(self._match, [self._shape.prompt(0)] * n)

    def collect_lists(self, n: int, seed: int) -> list[float]:
        return time_calls(self._match, [tokens.tolist() for tokens in self._some(n, seed)])

    def insert_new(self, n: int, shared: bool = True, scattered: bool = False) -> list[float]:
        """Inserts prompts of which the first half is there already, or nothing."""
        shape = self._shape if shared else Prompts(self._shape.tokens, 0)
        first, self._new = self._new, self._new + n
        values = self._tree.values(n * shape.blocks)
        if scattered:
            np.random.default_rng(1).shuffle(values)
        prompts = zip(shape.prompts(first, n), np.split(values, n), strict=True)
        return time_calls(self._tree.insert, list(prompts))

    def evict_leaf(self, n: int) -> list[float]:
        """One leaf a call."""
        return time_calls(self._tree.evict, [self._shape.leaf_blocks] * n)

    def evict_leaves(self, leaves: int) -> float:
        """So many leaves in one call; microseconds a leaf."""
        with no_collections():
            start = perf_counter_ns()
            self._tree.evict(leaves * self._shape.leaf_blocks)
            return (perf_counter_ns() - start) / 1000 / leaves

    def _some(self, n: int, seed: int) -> Iterator[Tokens]:
        choose = random.Random(seed)
        return (self._shape.prompt(choose.randrange(self._count)) for _ in range(n))

    def _match(self, tokens: Any) -> None:
        with self._tree.match(tokens) as hit:
            _ = hit.addrs


def _resident_bytes() -> int:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
