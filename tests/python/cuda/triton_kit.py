"""Runs the kernels of cuda/attention in Triton's interpreter, over the memory of a pool on the CPU.

Every argument is passed as variants.py declares it: a pointer that it gets wrong reads bytes as another type.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvpool

FOLDER = Path(__file__).resolve().parents[3] / "cuda" / "attention"
LEAF = 1024
UNIT = 16  # bytes
GUARD = 64  # floats before and behind a result
TILE = 64  # the largest of any variant, and a multiple of all


def module(name: str) -> ModuleType:
    """A file of cuda/attention, which is no package: a build runs it by itself."""
    spec = importlib.util.spec_from_file_location(f"kvpool_attention_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # Triton asks for it
    spec.loader.exec_module(loaded)
    return loaded


variants = module("variants")


def need_triton() -> None:
    """Skips the module that calls it where Triton or torch is not installed."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


@cache
def kernels() -> ModuleType:
    """The kernels, interpreted. Triton decides that when it is imported, which torch may do (tests/conftest.py)."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    return module("kernels")


def view(memory: np.ndarray, at: int, declared: str) -> Any:
    """What a pointer of this type sees from byte `at` of the memory on."""
    import torch

    types = {"*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16, "*i64": torch.int64}
    flat = memory.reshape(-1).view(np.uint8)[at:]
    dtype = types[declared]
    return torch.from_numpy(flat[: flat.size // dtype.itemsize * dtype.itemsize]).view(dtype)


def launch(variant: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """`arguments`: for a pointer (array, byte where it points to)."""
    assert set(arguments) == set(variant.arguments)
    assert all(n > 0 for n in grid)
    for name in variant.aligned:
        value = arguments[name]
        assert (value if isinstance(value, int) else value[1]) % 16 == 0, f"{name} is not aligned"
    given = {
        name: view(*arguments[name], declared) if declared.startswith("*") else arguments[name]
        for name, declared in variant.arguments.items()
    }
    constants = dict(variant.constants)
    if variant.dtype == "bfloat16":
        constants["FLOAT_DOT"] = True  # the interpreter of Triton 3.9 multiplies bfloat16 as integers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a GPU does not warn of NaN either
        getattr(kernels(), variant.kernel)[grid](**given, **constants)


@dataclass
class Item:
    """One sequence: its blocks in the pool's HBM, its queries, and which tokens to attend to."""

    addrs: np.ndarray
    q: np.ndarray  # [query token, query head, dim], in the bits of the layout's dtype
    begin: int
    end: int
    query_begin: int | None = None  # None: not causal

    @property
    def query_tokens(self) -> int:
        return len(self.q)


@dataclass
class Node:
    """A node of the merge tree, with its rows [query head, query token, ...]."""

    begin: int
    end: int
    acc: np.ndarray
    most: np.ndarray
    total: np.ndarray

    @property
    def out(self) -> np.ndarray:
        """[query token, query head, dim]."""
        safe = np.where(self.total == 0, 1, self.total)
        return (self.acc / safe[..., None]).swapaxes(0, 1)

    @property
    def lse(self) -> np.ndarray:
        """In base 2, [query head, query token]."""
        with np.errstate(divide="ignore"):
            return self.most + np.log2(self.total)


def maximal_nodes(begin: int, end: int) -> list[tuple[int, int]]:
    """As merge_tree.h describes them."""
    nodes = []
    while begin < end:
        size = LEAF
        if begin % LEAF or begin + LEAF > end:
            nodes.append((begin, min(end, begin - begin % LEAF + LEAF)))
        else:
            while begin % (2 * size) == 0 and begin + 2 * size <= end:
                size *= 2
            nodes.append((begin, begin + size))
        begin = nodes[-1][1]
    return nodes


def places(pool: kvpool.Pool, layer: int) -> tuple[np.ndarray, int, int, int, int, int]:
    """The memory of HBM; where K and V of the layer begin in a block, its bytes, and strides of heads and tokens."""
    memory = pool.tensor(kvpool.HBM).numpy()
    block = memory.strides[0]
    if pool.kv_layout.pages == "fused":  # [block, layer, head, token, K and V]
        a, b = memory.strides[2:4]
        k = layer * memory.strides[1]
        v = k + pool.kv_layout.head_dim * memory.itemsize
    else:  # [block, layer, K or V, head, token, dim]
        a, b = memory.strides[3:5]
        k = layer * memory.strides[1]
        v = k + memory.strides[2]
    head, token = (a, b) if pool.kv_layout.dims == "HND" else (b, a)
    return memory, k, v, block, head, token


class Run:
    """Computes a batch over the blocks of a pool with one layer's kernels."""

    def __init__(self, pool: kvpool.Pool, layer: int, items: list[Item], *, scale: float | None = None):
        layout = pool.kv_layout
        self.items = items
        self.query_heads = items[0].q.shape[1]
        self.dim, self.kv_heads = layout.head_dim, layout.kv_heads
        self.group = self.query_heads // self.kv_heads
        self.scale = (layout.head_dim**-0.5 if scale is None else scale) * np.log2(np.e)
        self.leaves = variants.variant_of("attend_leaves", layout.dtype, layout.head_dim)
        self.merge = variants.variant_of("merge_pairs", "", layout.head_dim)
        self.pool, self.layer = pool, layer
        self.slots: list[tuple[Item, int, int, int]] = []  # item, begin, end, float where it begins
        size = GUARD
        for item in items:
            for begin, end in maximal_nodes(item.begin, item.end):
                for leaf in range(begin, end, LEAF):
                    self.slots.append((item, leaf, min(leaf + LEAF, end), size))
                    size += item.query_tokens * self.query_heads * (self.dim + 2) + GUARD
                    size += -size % 4
        self.values = np.full(size, np.nan, np.float32)

    def tasks(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of `tasks`, and the block table."""
        block_tokens = self.pool.kv_layout.block_tokens
        block_bytes = places(self.pool, self.layer)[3]
        rows, blocks = [], []
        q_at = {id(item): sum(other.q.size for other in self.items[:i]) for i, item in enumerate(self.items)}
        begins = {}
        for item in self.items:
            begins[id(item)] = len(blocks)
            blocks += [kvpool.decode_address(a).block * block_bytes // UNIT for a in item.addrs]
        for item, begin, end, at in self.slots:
            first = begin % block_tokens
            visible = 2**48 if item.query_begin is None else item.query_begin + 1
            seen = min(max(visible - begin + first, -(2**30)), 2**30)
            rows.append([q_at[id(item)], begins[id(item)] + begin // block_tokens, first, end - begin,
                         begin % TILE, seen, at, item.query_tokens])  # fmt: skip
        return np.array(rows, np.int64), np.array(blocks, np.int64)

    def compute_leaves(self) -> None:
        memory, k, v, _, head, token = places(self.pool, self.layer)
        tasks, blocks = self.tasks()
        rows = self.group * max(item.query_tokens for item in self.items)
        launch(
            self.leaves,
            (len(tasks), self.kv_heads, -(-rows // self.leaves.rows)),
            q=(np.concatenate([item.q.reshape(-1) for item in self.items]), 0),
            k=(memory, k),
            v=(memory, v),
            k_blocks=(blocks, 0),
            v_blocks=(blocks, 0),
            tasks=(tasks, 0),
            out=(self.values, 0),
            head_stride=head // memory.itemsize,
            token_stride=token // memory.itemsize,
            block_tokens=self.pool.kv_layout.block_tokens,
            group=self.group,
            query_heads=self.query_heads,
            scale_log2e=float(self.scale),
        )

    def merge_level(self, pairs: list[tuple[int, int, int]]) -> None:
        grid = (len(pairs), -(-max(rows for _, _, rows in pairs) // self.merge.rows))
        launch(self.merge, grid, values=(self.values, 0), pairs=(np.array(pairs, np.int64), 0))

    def node(self, item: Item, begin: int, end: int, at: int) -> Node:
        """A copy of what lies there."""
        shape = (self.query_heads, item.query_tokens)
        n = shape[0] * shape[1]
        acc, most, total = np.split(self.values[at : at + n * (self.dim + 2)], [n * self.dim, n * (self.dim + 1)])
        return Node(begin, end, acc.reshape(*shape, -1).copy(), most.reshape(shape).copy(), total.reshape(shape).copy())

    def leaf_nodes(self) -> list[list[Node]]:
        """Of each item, before they are merged."""
        return [[self.node(*slot) for slot in self.slots if slot[0] is item] for item in self.items]

    def merge_nodes(self) -> list[list[Node]]:
        """Merges the leaves of each maximal node; gives the nodes of each item."""
        at = {(id(item), begin): place for item, begin, _, place in self.slots}
        size = LEAF
        longest = max((item.end for item in self.items), default=0)
        while 2 * size <= longest:
            pairs = [
                (at[id(item), left], at[id(item), left + size], self.query_heads * item.query_tokens)
                for item in self.items
                for begin, end in maximal_nodes(item.begin, item.end)
                for left in range(begin, end, 2 * size)
                if end - begin >= 2 * size
            ]
            if pairs:
                self.merge_level(pairs)
            size *= 2
        return [
            [self.node(item, begin, end, at[id(item), begin]) for begin, end in maximal_nodes(item.begin, item.end)]
            for item in self.items
        ]

    def check_guards(self) -> None:
        """Nothing was written beside the results."""
        written = np.zeros(self.values.size, bool)
        for item, _, _, at in self.slots:
            written[at : at + item.query_tokens * self.query_heads * (self.dim + 2)] = True
        assert np.isnan(self.values[~written]).all()


def joined(nodes: list[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse (base 2) over all nodes of an item, in double."""
    most = np.max([node.most for node in nodes], axis=0).astype(np.float64)
    base = np.where(np.isneginf(most), 0, most)
    weights = [np.exp2(node.most - base) for node in nodes]
    total = sum(node.total * w for node, w in zip(nodes, weights, strict=True))
    acc = sum(node.acc * w[..., None] for node, w in zip(nodes, weights, strict=True))
    with np.errstate(divide="ignore"):
        lse = base + np.log2(total)
    return (acc / np.where(total == 0, 1, total)[..., None]).swapaxes(0, 1), lse
