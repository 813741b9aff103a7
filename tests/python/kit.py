"""Shared by the tests of the local API: tiny pools, stamps, and the check that an error changed nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import forked
import numpy as np
import pytest
from gpu_memory import DeviceArray, fake_array, is_fake

import kvpool

LONG = bool(os.environ.get("KVPOOL_LONG"))
DEVICE = os.environ.get("KVPOOL_TEST_DEVICE", "cpu")  # of the pools below: the same tests run on a GPU
BLOCK = 4  # tokens in a block of the layouts below


def repeats(usual: int, *, long: int) -> int:
    """How many examples a test tries, or how often it kills or cuts off something.

    `long` times with KVPOOL_LONG=1, but no more than KVPOOL_LONG_EXAMPLES says, and never fewer than usual.
    """
    if not LONG:
        return usual
    return max(usual, min(long, int(os.environ.get("KVPOOL_LONG_EXAMPLES") or long)))


def small_layout(**changes: Any) -> kvpool.KVLayout:
    return kvpool.KVLayout(
        **({"layers": 2, "kv_heads": 2, "head_dim": 4, "dtype": "float32", "block_tokens": BLOCK} | changes)
    )


def small_pool(hbm_blocks: int = 8, dram_blocks: int = 8, layout: Any = None, **settings: Any) -> kvpool.Pool:
    settings = {"huge_pages": "never", "audit": True, "device": DEVICE} | settings
    return kvpool.Pool(layout or small_layout(), hbm_blocks, dram_blocks, **settings)


def prompt(blocks: int, name: int = 0, block_tokens: int = BLOCK) -> np.ndarray:
    """The tokens of a prompt. Prompts of different names differ from their first token on."""
    tokens = np.arange(blocks * block_tokens, dtype=np.int32) + 10
    tokens[:1] = -name
    return tokens


def content(pool: kvpool.Pool | kvpool.RankArena, medium: int) -> Any:
    """The elements of a medium's blocks, to read and to write, as NumPy sees them; also those on a GPU."""
    view = pool.tensor(medium)
    if view.device == "cpu" or not len(view):
        return view.numpy() if view.device == "cpu" else np.zeros(view.shape)
    return fake_array(view) if is_fake() else DeviceArray(view)


class Stamps:
    """Writes a number into every element of a block, and reads it back."""

    def __init__(self, pool: kvpool.Pool) -> None:
        stats = pool.stats()
        self.views = {
            medium: content(pool, medium)
            for medium, tier in ((kvpool.HBM, stats.hbm), (kvpool.DRAM, stats.dram))
            if tier.capacity
        }

    def write(self, addrs: Any, values: Any) -> None:
        for addr, value in zip(addrs, values, strict=True):
            place = kvpool.decode_address(addr)
            self.views[place.medium][place.block] = value

    def read(self, addrs: Any) -> list[int]:
        """The stamp of each block; the block must have one and the same in every element."""
        stamps = []
        for addr in addrs:
            place = kvpool.decode_address(addr)
            block = self.views[place.medium][place.block]
            stamps.append(int(block.flat[0]))
            assert (block == stamps[-1]).all(), f"block {place} has more than one stamp"
        return stamps


def store(
    pool: kvpool.Pool, tokens: np.ndarray, *, medium: int = kvpool.HBM, namespace: str = "", evict: bool = False
) -> np.ndarray:
    """Caches a prompt without keeping a pin; returns the addresses of its blocks."""
    addrs = pool.alloc(len(tokens) // pool.kv_layout.block_tokens, medium=medium, evict=evict)
    with pool.insert(tokens, addrs, namespace=namespace, free_duplicates=True) as held:
        return held.addrs


def cached_tokens(pool: kvpool.Pool, tokens: Any, namespace: str = "") -> int:
    """How much of a prompt is cached; does not count as a use of it."""
    return pool.explain_match(tokens, namespace=namespace).matched_tokens


def state_of(pool: kvpool.Pool) -> dict[str, Any]:
    """What a call that raises must leave as it is. (It may have cut runs of the index.)"""
    state = dict(vars(pool.audit()))
    del state["index_nodes"], state["index_bytes"], state["failed_allocations"]
    return state


@contextmanager
def refused(pool: kvpool.Pool, error: type[Exception], *texts: Any, **fields: Any) -> Iterator[Any]:
    """The block raises this error with these texts in its message and these fields, and has changed nothing."""
    before = state_of(pool)
    with pytest.raises(error) as caught:
        yield caught
    assert type(caught.value) is error
    for text in texts:
        assert str(text) in str(caught.value)
    for name, value in fields.items():
        assert getattr(caught.value, name) == caught.value.fields[name] == value, name
    assert state_of(pool) == before


@contextmanager
def hang_ups_work() -> Iterator[None]:
    """Here, and in processes that are started meanwhile: nohup has SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def ctrl_c_works() -> Iterator[None]:
    """Here, and in processes that are started meanwhile: shells have SIGINT ignored for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_script(
    code: str, *, timeout: float = 900 if LONG else 250, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a separate process, every warning an error; it must exit with 0 and print nothing.

    Ctrl-C works there, also when this process runs in the background, where shells have SIGINT ignored.
    """
    prelude = "import signal, warnings; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    prelude += "warnings.filterwarnings('ignore', 'This process', DeprecationWarning)\n"  # of forks beside threads
    prelude += "import kvpool, numpy as np, kit\n"
    run = forked.run(prelude + code, timeout=timeout, environment=dict(os.environ))
    if check:
        assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
    return run
