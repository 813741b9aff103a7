"""Pool.delete and evict: which prompts go, and which stay."""

from __future__ import annotations

import numpy as np
import pytest
from kit import BLOCK, cached_tokens, prompt, refused, small_pool, state_of, store

import kvpool
from kvpool import DRAM, HBM, MIXED


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


# ---- delete


def test_delete_removes_a_prompt(pool):
    store(pool, prompt(3))
    assert pool.delete(prompt(3)) == 3
    assert cached_tokens(pool, prompt(3)) == 0
    assert (pool.stats().hbm.free, pool.stats().index_blocks) == (8, 0)


def test_delete_leaves_pages_that_other_prompts_share(pool):
    store(pool, prompt(3))
    store(pool, np.r_[prompt(1), np.full(BLOCK, 60)])
    assert pool.delete(prompt(3)) == 2
    assert cached_tokens(pool, prompt(3)) == BLOCK
    assert cached_tokens(pool, np.r_[prompt(1), np.full(BLOCK, 60)]) == 2 * BLOCK


def test_delete_leaves_a_prefix_of_a_longer_prompt(pool):
    store(pool, prompt(3))
    assert pool.delete(prompt(2)) == 0
    assert cached_tokens(pool, prompt(3)) == 3 * BLOCK


def test_delete_with_descendants_removes_everything_longer(pool):
    store(pool, prompt(4))
    store(pool, np.r_[prompt(2), np.full(2 * BLOCK, 61)])
    store(pool, np.r_[prompt(1), np.full(BLOCK, 62)])
    assert pool.stats().index_blocks == 7
    assert pool.delete(prompt(2), descendants=True) == 5
    assert cached_tokens(pool, prompt(4)) == BLOCK
    assert cached_tokens(pool, np.r_[prompt(1), np.full(BLOCK, 62)]) == 2 * BLOCK


def test_deleting_an_unknown_prompt_removes_nothing(pool):
    store(pool, prompt(2))
    before = state_of(pool)
    assert pool.delete(prompt(2, 5)) == 0
    assert pool.delete(prompt(2), namespace="else") == 0
    assert pool.delete([]) == 0
    assert pool.delete([], descendants=True) == 0
    assert state_of(pool) == before


def test_delete_refuses_a_pinned_prompt_and_removes_nothing(pool):
    store(pool, prompt(4))
    with pool.match(prompt(3)):
        with refused(pool, kvpool.StateError, "3 of the blocks", pinned=3):
            pool.delete(prompt(4))
        with refused(pool, kvpool.StateError, pinned=3):
            pool.delete(prompt(1), descendants=True)
    assert pool.delete(prompt(4)) == 4


def test_addresses_of_a_deleted_prompt_are_stale(pool):
    addrs = store(pool, prompt(1))
    pool.delete(prompt(1))
    with refused(pool, kvpool.StaleAddress, "freed or moved", address=int(addrs[0]), position=0):
        pool.insert(prompt(1), addrs)


# ---- evict


def test_evict_drops_from_the_ends_of_the_coldest_prompts(pool):
    for name in range(3):
        store(pool, prompt(2, name))
    pool.match(prompt(1, 0)).close()  # its first block is used, not its second
    order = []
    while pool.evict(1, medium=HBM):
        order.append([cached_tokens(pool, prompt(2, name)) // BLOCK for name in range(3)])
    assert order == [[1, 2, 2], [1, 1, 2], [1, 0, 2], [1, 0, 1], [1, 0, 0], [0, 0, 0]]


def test_evict_takes_blocks_of_the_requested_medium(pool):
    store(pool, prompt(2, 1), medium=HBM)
    store(pool, prompt(2, 2), medium=DRAM)
    assert pool.evict(9) == 2  # DRAM
    assert cached_tokens(pool, prompt(2, 1)) == 2 * BLOCK
    assert pool.evict(9, medium=HBM) == 2
    assert pool.stats().evicted_blocks == 4


def test_mixed_evicts_dram_first(pool):
    store(pool, prompt(2, 1), medium=HBM)
    store(pool, prompt(2, 2), medium=DRAM)
    assert pool.evict(3, medium=MIXED) == 3
    assert cached_tokens(pool, prompt(2, 1)) == BLOCK
    assert pool.evict(0, medium=MIXED) == 0


def test_lfu_keeps_prompts_that_are_used_often():
    with small_pool(policy="lfu") as pool:
        store(pool, prompt(2, 1))
        for _ in range(3):
            pool.match(prompt(2, 1)).close()
        store(pool, prompt(2, 2))
        pool.match(prompt(2, 2)).close()
        store(pool, prompt(2, 3))
        assert pool.evict(4, medium=HBM) == 4
        assert [cached_tokens(pool, prompt(2, name)) // BLOCK for name in (1, 2, 3)] == [2, 0, 0]


def test_fifo_ignores_use():
    with small_pool(policy="fifo") as pool:
        for name in range(3):
            store(pool, prompt(2, name))
        for _ in range(3):
            pool.match(prompt(2, 0)).close()
        assert pool.evict(3, medium=HBM) == 3
        assert [cached_tokens(pool, prompt(2, name)) // BLOCK for name in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_no_policy_leaves_a_hole_in_a_prompt(policy):
    random = np.random.default_rng(3)
    with small_pool(hbm_blocks=32, dram_blocks=0, policy=policy) as pool:
        for _ in range(300):
            tokens = np.repeat(random.integers(0, 3, 4), BLOCK)
            with pool.match(tokens) as hit:
                missing = 4 - hit.tokens // BLOCK
                pool.insert(tokens, np.r_[hit.addrs, pool.alloc(missing)]).close()
            pool.evict(int(random.integers(0, 4)), medium=HBM)  # audits after each call
        assert pool.stats().evicted_blocks > 100
