"""kvpool.KeyedCache: blocks of a pool under keys."""

from __future__ import annotations

import gc
import hashlib
import os

import numpy as np
import pytest
from kit import Stamps, prompt, refused, small_layout, small_pool, store

import kvpool

KEYS = [hashlib.sha256(str(i).encode()).digest() for i in range(20)]
ROW = small_layout().block_bytes


def rows(*values: int) -> np.ndarray:
    return np.repeat(np.array(values, np.uint8)[:, None], ROW, axis=1)


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool
        if not pool.closed:
            pool.audit()


@pytest.fixture
def cache(pool):
    with kvpool.KeyedCache(pool, blocks=4) as cache:
        yield cache
        if not (cache.closed or pool.closed):
            cache.audit()


def test_rows_of_the_caller_come_back(cache):
    assert cache.put(KEYS[:3], rows(1, 2, 3)) == 3
    assert cache.put([KEYS[2].hex(), KEYS[3].hex()], rows(9, 4)) == 1
    into = np.zeros((5, ROW), np.uint8)
    assert cache.get(KEYS[:5], into) == 4
    assert into[:, 0].tolist() == [1, 2, 3, 4, 0]
    assert (into == into[:, :1]).all()
    assert cache.count(KEYS[:5]) == len(cache) == 4
    assert cache.exists(KEYS[3:5]).tolist() == [True, False]
    stats = cache.stats()
    assert (stats["saved_blocks"], stats["duplicate_blocks"], stats["found_blocks"], stats["missed_blocks"]) == (
        4,
        1,
        4,
        1,
    )
    assert (cache.key_bytes, cache.block_bytes) == (32, ROW)


def test_blocks_of_hbm_are_saved_and_loaded(pool, cache):
    stamps = Stamps(pool)
    mine, room = pool.alloc(3), pool.alloc(3)
    stamps.write(mine, [1, 2, 3])
    stamps.write(room, [7, 8, 9])
    assert cache.save(KEYS[:3], mine) == 3
    stamps.write(mine, [0, 0, 0])
    assert cache.load([KEYS[2], KEYS[0], KEYS[9]], room) == 2
    assert stamps.read(room) == [3, 1, 9]
    with cache.match(KEYS[:2]) as hit:
        assert stamps.read(hit.addrs) == [1, 2]


def test_the_coldest_go_and_the_pool_has_them_back(pool, cache):
    cache.put(KEYS[:4], rows(1, 2, 3, 4))
    cache.put(KEYS[4:6], rows(5, 6))
    assert cache.exists(KEYS[:6]).tolist() == [True, True, False, False, True, True]
    assert pool.stats().dram.active == 4
    assert (cache.forget(KEYS[:1]), cache.evict(1)) == (1, 1)
    assert pool.stats().dram.active == 2
    assert cache.stats()["evicted_blocks"] == 3


def test_cached_prompts_make_room_up_to_the_bound(pool, cache):
    store(pool, prompt(6, 1), medium=kvpool.DRAM)
    cache.put(KEYS[:4], rows(1, 2, 3, 4))
    with pool.match(prompt(6, 1)) as hit:
        assert len(hit.addrs) == 4
    cache.put(KEYS[4:8], rows(1, 2, 3, 4))
    with pool.match(prompt(6, 1)) as hit:
        assert len(hit.addrs) == 4


def test_pinned_blocks_stay(pool, cache):
    cache.put(KEYS[:4], rows(1, 2, 3, 4))
    with cache.match(KEYS[:4]):
        with refused(pool, kvpool.OutOfBlocks, "keyed cache", requested=1, evictable=0):
            cache.put(KEYS[4:5], rows(5))
        with refused(pool, kvpool.StateError, pinned=1):
            cache.forget(KEYS[:1])
    assert cache.put(KEYS[4:5], rows(5)) == 1


def test_wrong_arguments_change_nothing(pool, cache):
    cache.put(KEYS[:1], rows(1))
    mine = pool.alloc(2)
    freed = pool.alloc(1)
    pool.free(freed)
    in_dram = pool.alloc(1, medium=kvpool.DRAM)
    read_only = np.zeros(ROW, np.uint8)
    read_only.flags.writeable = False
    for error, call in (
        (kvpool.ArgumentError, lambda: cache.put(KEYS[:2], rows(1))),
        (kvpool.ArgumentTypeError, lambda: cache.put(KEYS[:1], [1])),
        (kvpool.ArgumentTypeError, lambda: cache.put(KEYS[:1], np.zeros((ROW, 2), np.uint8)[:, 0])),
        (kvpool.ArgumentError, lambda: cache.get(KEYS[:2], rows(1))),
        (kvpool.ArgumentTypeError, lambda: cache.get(KEYS[:1], bytes(ROW))),
        (kvpool.ArgumentTypeError, lambda: cache.get(KEYS[:1], read_only)),
        (kvpool.ArgumentError, lambda: cache.save(KEYS[:1], mine)),
        (kvpool.StaleAddress, lambda: cache.save(KEYS[1:2], freed)),
        (kvpool.ArgumentError, lambda: cache.save(KEYS[1:2], in_dram)),
        (kvpool.ArgumentError, lambda: cache.load(KEYS[:1], in_dram)),
        (kvpool.StaleAddress, lambda: cache.load(KEYS[:1], freed)),
        (kvpool.ArgumentError, lambda: cache.put([b"1"], rows(1))),
        (kvpool.OutOfBlocks, lambda: cache.put(KEYS[5:10], rows(1, 2, 3, 4, 5))),
        (kvpool.ArgumentError, lambda: kvpool.KeyedCache(pool, 0)),
        (kvpool.ArgumentError, lambda: kvpool.KeyedCache(pool, 9)),
        (kvpool.ArgumentError, lambda: kvpool.KeyedCache(pool, 1, 100)),
        (kvpool.ArgumentTypeError, lambda: kvpool.KeyedCache(None, 1)),
    ):
        with refused(pool, error):
            call()
    assert len(cache) == cache.stats()["evictable"] == 1


def test_a_closed_cache_gives_its_blocks_back(pool):
    cache = kvpool.KeyedCache(pool, 4)
    cache.put(KEYS[:3], rows(1, 2, 3))
    hit = cache.match(KEYS[:1])
    cache.close()
    cache.close()
    assert cache.closed
    assert pool.stats().dram.active == 1
    with pytest.raises(kvpool.ClosedError, match="keyed cache"):
        cache.count(KEYS)
    hit.close()
    assert pool.stats().dram.active == 0


def test_a_cache_that_is_dropped_gives_its_blocks_back(pool):
    cache = kvpool.KeyedCache(pool, 4)
    cache.put(KEYS[:3], rows(1, 2, 3))
    del cache
    gc.collect()
    assert pool.stats().dram.active == 0


def test_a_closed_pool_closes_its_caches(pool, cache):
    cache.put(KEYS[:2], rows(1, 2))
    hit = cache.match(KEYS[:2])
    pool.close()
    for call in (lambda: cache.count(KEYS), lambda: cache.put(KEYS[:1], rows(1)), lambda: cache.match(KEYS)):
        with pytest.raises(kvpool.ClosedError):
            call()
    hit.close()


def test_a_cache_keeps_its_pool():
    cache = kvpool.KeyedCache(small_pool(), 4)
    gc.collect()
    assert cache.put(KEYS[:1], rows(1)) == 1
    into = np.zeros(ROW, np.uint8)
    assert cache.get(KEYS[:1], into) == 1
    assert into[0] == 1


def test_a_child_process_is_refused(pool, cache):
    cache.put(KEYS[:1], rows(1))
    child = os.fork()
    if child == 0:
        try:
            cache.count(KEYS)
        except kvpool.ForkError:
            cache.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert cache.count(KEYS) == 1
