"""Pools among which blocks of a sequence move, and attention over them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from attention_kit import BLOCK, pool_of, write_kv

import kvpool

LEAF = 1024 // BLOCK
_numbers = itertools.count()


def listening(pool):
    return pool.peers.listen(f"unix:@kvpool-attention-{os.getpid()}-{next(_numbers)}")


@contextmanager
def three_pools() -> Iterator[list[kvpool.Pool]]:
    """The first is connected to the others."""
    # A busy machine, or a creditor that is stopped, must not end a link.
    pools = [pool_of(hbm=0, dram=4 * LEAF, name=name, secret="s", lease_s=60.0) for name in "abc"]
    for other in pools[1:]:
        pools[0].peers.connect(listening(other))
    yield pools
    for pool in pools:
        pool.close()


def written(pool, blocks, tokens=None):
    addrs = pool.alloc(blocks, kvpool.DRAM)
    write_kv(pool, addrs, np.random.default_rng(1), tokens)
    return addrs


def query(rows=1, heads=4):
    return np.random.default_rng(2).standard_normal((rows, heads, 16)).astype(np.float32)


def out(pool, seq, **options):
    return pool.attend(1, query(), [seq], **options).wait().finish("float32")


def free_of(pool):
    return pool.stats().dram.free


def become_free(blocks, *pools):
    """Owners are told of the end of a view without being waited for."""
    until = time.monotonic() + 60
    while [free_of(pool) for pool in pools] != [blocks] * len(pools):
        assert time.monotonic() < until, [free_of(pool) for pool in pools]
        time.sleep(0.001)
