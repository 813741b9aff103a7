"""Pool.swap_out and Pool.swap_in: bytes, index and pins follow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kit import BLOCK, Stamps, cached_tokens, content, prompt, refused, small_layout, small_pool, store

import kvpool
from kvpool import DRAM, HBM


@pytest.fixture(params=["aggregated", "discrete"])
def pool(request):
    with small_pool(layout=small_layout(order=request.param)) as pool:
        yield pool


def media_of(pool, tokens):
    return kvpool.media(pool.explain_match(tokens).addrs).tolist()


def test_swap_out_moves_the_coldest_prompts_from_their_ends(pool):
    stamps = Stamps(pool)
    for name in range(2):
        stamps.write(store(pool, prompt(3, name)), range(10 * name, 10 * name + 3))
    moved = pool.swap_out(4)
    assert kvpool.media(moved).tolist() == [DRAM] * 4
    assert media_of(pool, prompt(3, 0)) == [DRAM] * 3
    assert media_of(pool, prompt(3, 1)) == [HBM, HBM, DRAM]
    for name in range(2):
        with pool.match(prompt(3, name)) as hit:
            assert stamps.read(hit.addrs) == [10 * name, 10 * name + 1, 10 * name + 2]
    assert pool.stats().swapped_out_blocks == 4


def test_swap_out_moves_no_more_blocks_than_exist(pool):
    store(pool, prompt(3))
    assert len(pool.swap_out(100)) == 3
    assert len(pool.swap_out(100)) == 0
    assert len(pool.swap_out(0)) == 0


def test_a_swapped_out_block_has_a_stale_address(pool):
    addrs = store(pool, prompt(2))
    pool.swap_out(2)
    for call in (pool.free, pool.swap_in):
        with refused(pool, kvpool.StaleAddress, address=int(addrs[0]), position=0):
            call(addrs)


def test_swap_out_leaves_active_and_pinned_blocks(pool):
    pool.alloc(3)
    store(pool, prompt(3))
    with pool.match(prompt(2)):
        assert len(pool.swap_out(8)) == 1
    assert len(pool.swap_out(8)) == 2
    assert pool.stats().hbm.active == 3


def test_swap_out_drops_the_coldest_of_a_full_dram(pool):
    store(pool, prompt(8, 1), medium=DRAM)
    store(pool, prompt(4, 2))
    assert len(pool.swap_out(4)) == 4
    assert cached_tokens(pool, prompt(8, 1)) == 4 * BLOCK
    assert media_of(pool, prompt(4, 2)) == [DRAM] * 4
    assert pool.stats().evicted_blocks == 4


def test_swap_out_moves_what_fits_where_dram_is_in_use(pool):
    pool.alloc(6, medium=DRAM)
    store(pool, prompt(4))
    assert len(pool.swap_out(4)) == 2
    assert media_of(pool, prompt(4)) == [HBM, HBM, DRAM, DRAM]


def test_swap_in_brings_a_prompt_back(pool):
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(4)), [1, 2, 3, 4])
    pool.swap_out(3)
    with pool.match(prompt(4)) as hit:
        with pool.swap_in(hit.addrs) as held:
            assert kvpool.media(held.addrs).tolist() == [HBM] * 4
            assert held.addrs[0] == hit.addrs[0]
            assert stamps.read(held.addrs) == [1, 2, 3, 4]
            assert stamps.read(hit.addrs) == [1, 2, 3, 4]  # still pinned where they were
            assert pool.stats().dram.pinned == 3
        assert pool.stats().hbm.pinned == 4
    assert pool.stats().dram.free == 8
    assert pool.stats().hbm.pinned == 0
    with pool.match(prompt(4)) as hit:
        assert hit.addrs.tolist() == held.addrs.tolist()
    assert pool.stats().swapped_in_blocks == 3


def test_old_blocks_of_a_swap_in_live_until_their_last_reader_goes(pool):
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(2)), [1, 2])
    pool.swap_out(2)
    early, late = pool.match(prompt(2)), pool.match(prompt(1))
    pool.swap_in(early.addrs).close()
    after = pool.match(prompt(2))
    assert kvpool.media(after.addrs).tolist() == [HBM] * 2
    assert stamps.read(early.addrs) == [1, 2]
    early.close()
    assert stamps.read(late.addrs) == [1]
    assert pool.stats().dram.free == 7
    late.close()
    assert pool.stats().dram.free == 8
    after.close()


def test_an_address_from_before_a_swap_in_finds_the_current_block(pool):
    store(pool, prompt(2))
    pool.swap_out(2)
    with pool.match(prompt(2)) as hit, pool.swap_in(hit.addrs) as first:
        with pool.swap_in(hit.addrs) as second:  # two holders of one match may both bring it to HBM
            assert second.addrs.tolist() == first.addrs.tolist()
        with refused(pool, kvpool.ArgumentError, "twice", position=1):
            pool.swap_in([hit.addrs[0], first.addrs[0]])
        with refused(pool, kvpool.StateError):
            pool.free(hit.addrs)
        with pool.insert(prompt(3), np.r_[hit.addrs, pool.alloc(1)]) as held:  # but it may stand for its page
            assert held.inserted == 1
            assert kvpool.media(held.addrs).tolist() == [HBM] * 3


def test_any_blocks_in_any_order_can_be_swapped_in(pool):
    stamps = Stamps(pool)
    for order in itertools.permutations(range(4)):
        stamps.write(store(pool, prompt(4)), [1, 2, 3, 4])
        pool.swap_out(4)
        with pool.match(prompt(4)) as hit, pool.swap_in(hit.addrs[list(order[:3])]) as held:
            assert stamps.read(held.addrs) == [at + 1 for at in order[:3]]
        assert media_of(pool, prompt(4))[order[3]] == DRAM
        pool.delete(prompt(4))
    assert pool.stats().dram.free == pool.stats().hbm.free == 8


def test_swap_in_makes_room_by_moving_others_down(pool):
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(4, 1)), [1, 2, 3, 4])
    pool.swap_out(4)
    stamps.write(store(pool, prompt(8, 2)), range(20, 28))
    with pool.match(prompt(4, 1)) as hit, pool.swap_in(hit.addrs) as held:
        assert stamps.read(held.addrs) == [1, 2, 3, 4]
    assert media_of(pool, prompt(8, 2)) == [HBM] * 4 + [DRAM] * 4
    with pool.match(prompt(8, 2)) as hit:
        assert stamps.read(hit.addrs) == list(range(20, 28))


def test_swap_in_without_room_changes_nothing(pool):
    store(pool, prompt(4))
    pool.swap_out(4)
    pool.alloc(6)
    with (
        pool.match(prompt(4)) as hit,
        refused(pool, kvpool.OutOfBlocks, requested=4, free=2, active=6, evictable=0, pinned=0, capacity=8),
    ):
        pool.swap_in(hit.addrs)


def test_swap_in_uses_blocks_that_the_caller_chooses(pool):
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(3)), [1, 2, 3])
    pool.swap_out(2)
    into = pool.alloc(2)[::-1]
    with pool.match(prompt(3)) as hit, pool.swap_in(hit.addrs, into=into) as held:
        assert held.addrs[1:].tolist() == into.tolist()
        assert stamps.read(held.addrs) == [1, 2, 3]
    assert pool.stats().hbm.active == 0


def test_swap_in_refuses_blocks_that_do_not_fit(pool):
    store(pool, prompt(2))
    pool.swap_out(2)
    hbm, dram = pool.alloc(3), pool.alloc(2, medium=DRAM)
    with pool.match(prompt(2)) as hit:
        with refused(pool, kvpool.ArgumentError, needed=2, given=3):
            pool.swap_in(hit.addrs, into=hbm)
        with refused(pool, kvpool.ArgumentError, "DRAM", position=0):
            pool.swap_in(hit.addrs, into=dram)
        with refused(pool, kvpool.ArgumentError, "twice", position=1):
            pool.swap_in(hit.addrs, into=hbm[[0, 0]])
        with refused(pool, kvpool.StateError, "historical"):
            pool.swap_in(hit.addrs, into=hit.addrs)
        pool.swap_in(hit.addrs, into=hbm[:2]).close()


def test_swap_in_takes_cached_blocks_only_and_each_once(pool):
    addrs = store(pool, prompt(2))
    mine = pool.alloc(1)
    with refused(pool, kvpool.StateError, "active, not historical", address=int(mine[0]), position=1):
        pool.swap_in([int(addrs[0]), int(mine[0])])
    with refused(pool, kvpool.ArgumentError, "twice", position=2):
        pool.swap_in(addrs[[0, 1, 0]])
    with pool.swap_in([]) as held:
        assert len(held.addrs) == 0


def test_swap_in_of_hbm_blocks_only_pins(pool):
    addrs = store(pool, prompt(2))
    with pool.swap_in(addrs) as held:
        assert held.addrs.tolist() == addrs.tolist()
        assert pool.stats().hbm.pinned == 2
    assert (pool.stats().hbm.pinned, pool.stats().swapped_in_blocks) == (0, 0)


def test_swapped_in_blocks_are_pinned_with_their_prefix(pool):
    store(pool, prompt(4))
    pool.swap_out(4)
    last = pool.explain_match(prompt(4)).addrs[3:]
    with pool.swap_in(last):
        assert (pool.stats().hbm.pinned, pool.stats().dram.pinned) == (1, 3)
        with refused(pool, kvpool.StateError, pinned=4):
            pool.delete(prompt(4))


def test_an_evicted_block_takes_its_descendants_with_it(pool):
    store(pool, prompt(4))
    pool.swap_out(4)
    pool.swap_in(pool.explain_match(prompt(4)).addrs[2:]).close()
    assert media_of(pool, prompt(4)) == [DRAM, DRAM, HBM, HBM]
    assert pool.evict(1, medium=DRAM) == 1
    assert cached_tokens(pool, prompt(4)) == BLOCK
    assert (pool.stats().hbm.free, pool.stats().index_blocks) == (8, 1)


@pytest.mark.parametrize("tier", [{"hbm_blocks": 0}, {"dram_blocks": 0}])
def test_swap_needs_both_tiers(tier):
    with small_pool(**tier) as pool, refused(pool, kvpool.StateError, "both tiers"):
        pool.swap_out(1)


def test_swap_in_needs_hbm():
    with small_pool(hbm_blocks=0) as pool:
        addrs = store(pool, prompt(2), medium=DRAM)
        with refused(pool, kvpool.StateError, "HBM"):
            pool.swap_in(addrs)


@pytest.mark.parametrize("dtype", kvpool.types.DTYPES)
@pytest.mark.parametrize("order", ["aggregated", "discrete"])
def test_every_bit_survives_the_way_down_and_up(order, dtype):
    layout = kvpool.KVLayout(layers=3, kv_heads=2, head_dim=5, dtype=dtype, block_tokens=BLOCK, order=order)
    with small_pool(layout=layout) as pool:
        random = np.random.default_rng(1)
        addrs = pool.alloc(5)
        bits = random.integers(0, 256, (5, layout.block_bytes), np.uint8).view(layout.numpy_dtype)
        bits = bits.reshape(5, *layout.shape)
        kv = {medium: content(pool, medium) for medium in (HBM, DRAM)}
        kv[HBM][kvpool.block_ids(addrs)] = bits
        pool.insert(prompt(5), addrs).close()
        moved = pool.swap_out(5)
        with pool.match(prompt(5)) as hit:
            assert set(hit.addrs.tolist()) == set(moved.tolist())
            assert kv[DRAM][kvpool.block_ids(hit.addrs)].tobytes() == bits.tobytes()
            kv[HBM][:] = 0
            with pool.swap_in(hit.addrs) as held:
                assert kv[HBM][kvpool.block_ids(held.addrs)].tobytes() == bits.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("order", ["aggregated", "discrete"])
def test_large_blocks_are_copied_whole_by_any_number_of_threads(order, threads):
    layout = kvpool.KVLayout(layers=4, kv_heads=4, head_dim=32, dtype="float32", block_tokens=16, order=order)
    assert layout.block_bytes == 64 << 10
    with small_pool(64, 64, layout, copy_threads=threads, huge_pages="auto") as pool:  # 4 MiB a swap
        random = np.random.default_rng(2)
        addrs = pool.alloc(64)
        kv = content(pool, HBM)
        bits = random.integers(0, 1 << 32, (64, layout.block_bytes // 4), np.uint32).view(np.float32)
        kv[kvpool.block_ids(addrs)] = bits.reshape(64, *layout.shape)
        tokens = prompt(64, block_tokens=16)
        pool.insert(tokens, addrs).close()
        assert len(pool.swap_out(64)) == 64
        kv[:] = 0
        with pool.match(tokens) as hit, pool.swap_in(hit.addrs) as held:
            assert kv[kvpool.block_ids(held.addrs)].tobytes() == bits.tobytes()
