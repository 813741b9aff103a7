"""Pool.alloc, Pool.free and addresses."""

from __future__ import annotations

import numpy as np
import pytest
from kit import BLOCK, Stamps, cached_tokens, prompt, refused, small_pool, store

import kvpool
from kvpool import DRAM, HBM, MIXED


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


def test_addresses_are_a_uint64_array_of_active_blocks(pool):
    addrs = pool.alloc(3)
    assert addrs.dtype == np.uint64
    assert kvpool.media(addrs).tolist() == [HBM] * 3
    assert len(set(kvpool.block_ids(addrs).tolist())) == 3
    tier = pool.stats().hbm
    assert (tier.active, tier.free, tier.historical) == (3, 5, 0)


@pytest.mark.parametrize("medium", [HBM, DRAM])
def test_blocks_come_from_the_medium_that_was_asked_for(pool, medium):
    assert kvpool.media(pool.alloc(8, medium=medium)).tolist() == [medium] * 8


def test_mixed_takes_hbm_first_and_the_rest_from_dram(pool):
    pool.alloc(5)
    assert kvpool.media(pool.alloc(7, medium=MIXED)).tolist() == [HBM] * 3 + [DRAM] * 4


def test_nothing_can_be_allocated(pool):
    assert len(pool.alloc(0)) == 0
    pool.free(pool.alloc(0))


def test_blocks_of_one_call_lie_side_by_side(pool):
    assert kvpool.block_ids(pool.alloc(8)).tolist() == list(range(8))


def test_a_hole_that_fits_is_preferred_to_scattered_blocks():
    with small_pool(hbm_blocks=16) as pool:
        addrs = pool.alloc(16)
        pool.free(addrs[[1, 3, 5, 8, 9, 10, 11]])
        assert kvpool.block_ids(pool.alloc(4)).tolist() == [8, 9, 10, 11]
        assert sorted(kvpool.block_ids(pool.alloc(3)).tolist()) == [1, 3, 5]


def test_freed_blocks_come_back_under_new_addresses(pool):
    before = pool.alloc(8)
    pool.free(before)
    after = pool.alloc(8)
    assert sorted(kvpool.block_ids(after)) == sorted(kvpool.block_ids(before))
    assert not set(after.tolist()) & set(before.tolist())
    assert {kvpool.decode_address(a).generation for a in after} == {
        kvpool.decode_address(a).generation + 1 for a in before
    }


def test_allocation_is_all_or_nothing(pool):
    held = pool.alloc(5)
    with refused(pool, kvpool.OutOfBlocks, requested=4, free=3, active=5, evictable=0, pinned=0, capacity=8):
        pool.alloc(4)
    pool.free(held)
    assert len(pool.alloc(8)) == 8


def test_mixed_is_all_or_nothing_over_both_tiers(pool):
    pool.alloc(5, medium=HBM)
    pool.alloc(6, medium=DRAM)
    with refused(pool, kvpool.OutOfBlocks, requested=6, free=5, active=11, capacity=16):
        pool.alloc(6, medium=MIXED)


def test_the_error_for_too_many_blocks_names_the_capacity(pool):
    with refused(pool, kvpool.OutOfBlocks, "9 blocks of HBM", requested=9, capacity=8, free=8):
        pool.alloc(9)


def test_any_vector_of_addresses_can_be_freed(pool):
    for form in (lambda a: a, lambda a: a.tolist(), lambda a: tuple(a.tolist()), memoryview, lambda a: a[::-1], list):
        pool.free(form(pool.alloc(8)))
    wide = np.zeros((8, 3), np.uint64)
    wide[:, 1] = pool.alloc(8)
    pool.free(wide[:, 1])  # with a stride
    pool.free(pool.alloc(8).view(np.int64))
    assert pool.stats().hbm.free == 8


def test_allocation_moves_the_coldest_prompts_down(pool):
    for name in range(4):
        store(pool, prompt(2, name))
    with pool.match(prompt(2, 0)):
        pass  # the oldest becomes the youngest
    pool.alloc(4)
    where = [kvpool.media(pool.explain_match(prompt(2, name)).addrs).tolist() for name in range(4)]
    assert where == [[HBM] * 2, [DRAM] * 2, [DRAM] * 2, [HBM] * 2]
    assert pool.stats().swapped_out_blocks == 4
    assert pool.stats().evicted_blocks == 0


def test_allocation_drops_the_coldest_when_both_tiers_are_full(pool):
    for name in range(4):
        store(pool, prompt(2, name), medium=DRAM)
    for name in range(4, 8):
        store(pool, prompt(2, name))
    pool.alloc(4)
    assert [cached_tokens(pool, prompt(2, name)) for name in range(8)] == [0, 0] + [2 * BLOCK] * 6
    assert pool.stats().evicted_blocks == 4


def test_allocation_drops_where_there_is_no_dram():
    with small_pool(dram_blocks=0) as pool:
        for name in range(4):
            store(pool, prompt(2, name))
        pool.alloc(3)
        assert [cached_tokens(pool, prompt(2, name)) for name in range(4)] == [0, BLOCK, 2 * BLOCK, 2 * BLOCK]


def test_allocation_drops_where_dram_is_in_use(pool):
    pool.alloc(7, medium=DRAM)
    store(pool, prompt(8))
    pool.alloc(4)
    assert cached_tokens(pool, prompt(8)) == 5 * BLOCK  # three dropped, one moved down
    assert (pool.stats().evicted_blocks, pool.stats().swapped_out_blocks) == (3, 1)


def test_mixed_drops_from_dram_before_it_drops_from_hbm(pool):
    store(pool, prompt(4, 1))
    store(pool, prompt(4, 2), medium=DRAM)
    pool.alloc(11, medium=MIXED)
    assert cached_tokens(pool, prompt(4, 1)) == 4 * BLOCK
    assert cached_tokens(pool, prompt(4, 2)) == 1 * BLOCK


def test_without_evict_nothing_is_evicted(pool):
    store(pool, prompt(6))
    with refused(pool, kvpool.OutOfBlocks, "6 evictable", requested=3, free=2, evictable=6, pinned=0):
        pool.alloc(3, evict=False)
    assert len(pool.alloc(2, evict=False)) == 2


def test_pinned_blocks_are_never_evicted(pool):
    store(pool, prompt(6))
    with pool.match(prompt(2)) as hit:
        with refused(pool, kvpool.OutOfBlocks, requested=7, free=2, evictable=4, pinned=2, active=0):
            pool.alloc(7)
        pool.free(pool.alloc(6))
        assert cached_tokens(pool, prompt(2)) == hit.tokens
    assert len(pool.alloc(7)) == 7


def test_zero_on_alloc_hands_out_zeros():
    with small_pool(zero_on_alloc=True) as pool:
        stamps = Stamps(pool)
        for medium in (HBM, DRAM, MIXED):
            addrs = pool.alloc(8, medium=medium)
            stamps.write(addrs, range(1, 9))
            pool.free(addrs)
            again = pool.alloc(8, medium=medium)
            assert stamps.read(again) == [0] * 8
            pool.free(again)


def test_blocks_keep_what_was_written_until_they_are_freed(pool):
    stamps = Stamps(pool)
    addrs = pool.alloc(16, medium=MIXED)
    stamps.write(addrs, range(100, 116))
    pool.free(addrs[::2])
    stamps.write(pool.alloc(8, medium=MIXED), range(8))
    assert stamps.read(addrs[1::2]) == list(range(101, 116, 2))


def test_churn_of_random_sizes_never_gives_a_block_twice():
    random = np.random.default_rng(7)
    with small_pool(hbm_blocks=64, dram_blocks=32, audit=False) as pool:
        held: list[np.ndarray] = []
        taken: set[tuple[int, int]] = set()
        for _ in range(3000):
            if held and random.random() < 0.5:
                addrs = held.pop(random.integers(len(held)))
                pool.free(addrs)
                taken -= places(addrs)
                continue
            n = int(random.integers(0, 20))
            if n > 96 - len(taken):
                with pytest.raises(kvpool.OutOfBlocks):
                    pool.alloc(n, medium=MIXED)
                continue
            held.append(pool.alloc(n, medium=MIXED))
            assert len(places(held[-1])) == n
            assert not taken & places(held[-1])
            taken |= places(held[-1])
        assert pool.audit().hbm.active + pool.audit().dram.active == len(taken)


def places(addrs):
    return set(zip(kvpool.media(addrs).tolist(), kvpool.block_ids(addrs).tolist(), strict=True))


def test_counters_count_blocks(pool):
    pool.free(pool.alloc(5))
    pool.alloc(3, medium=MIXED)
    stats = pool.stats()
    assert (stats.allocated_blocks, stats.freed_blocks) == (8, 5)


def test_metadata_takes_eighteen_bytes_a_block():
    sizes = []
    for blocks in (4096, 8192):
        with small_pool(hbm_blocks=blocks, dram_blocks=0, layout=kvpool.RawLayout(1, 1)) as pool:
            sizes.append(pool.stats().metadata_bytes)
    assert sizes[1] - sizes[0] == 18 * 4096  # 2 of them count its readers
    assert sizes[0] - 18 * 4096 <= 3 * 32768  # overhead of each medium, whatever its blocks
