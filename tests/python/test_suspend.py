"""An engine takes HBM back for a while: it unmaps the memory, so whatever still touched it would crash here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit import BLOCK, Stamps, cached_tokens, prompt, refused, small_layout, small_pool, store
from suspend_kit import BLOCKS, Adopted, Unmappable

import kvpool
from kvpool import DRAM, HBM, MIXED, Pool, _core


def made(dram_blocks: int = BLOCKS, **settings: Any) -> Iterator[Adopted]:
    memory = Unmappable()
    options: dict[str, Any] = {"huge_pages": "never", "audit": True, **settings}
    with Pool(small_layout(), hbm=memory.tensors, dram_blocks=dram_blocks, **options) as pool:
        yield Adopted(pool, memory)


@pytest.fixture
def one() -> Iterator[Adopted]:
    yield from made()


@pytest.fixture
def tight() -> Iterator[Adopted]:
    yield from made(dram_blocks=3)


def test_what_is_cached_sleeps_in_dram_and_comes_back_bit_by_bit(one):
    one.store(3, name=1)
    one.store(2, name=2)
    assert one.sleep() == 5
    assert one.pool.suspended
    stats = one.pool.audit()
    assert (stats.hbm.suspended, stats.hbm.free, stats.hbm.historical) == (BLOCKS, 0, 0)
    assert stats.dram.historical == 5
    with one.pool.match(prompt(3, 1)) as hit:  # found as before, where it lies
        assert hit.tokens == 3 * BLOCK
        assert {kvpool.decode_address(addr).medium for addr in hit.addrs} == {DRAM}
    one.wake()
    assert not one.pool.suspended
    assert one.pool.stats().hbm.free == BLOCKS
    assert one.read(1, 3) == [1, 1, 1]
    assert one.read(2, 2) == [2, 2]


def test_nothing_is_kept_if_the_caller_does_not_want_it(one):
    one.store(3, name=1)
    assert one.sleep(keep=False) == 0
    assert one.pool.stats().dram.historical == 0
    one.wake()
    assert cached_tokens(one.pool, prompt(3, 1)) == 0


def test_what_does_not_fit_is_dropped_the_coldest_first(tight):
    tight.store(3, name=1)
    tight.store(2, name=2)
    with tight.pool.match(prompt(2, 2)):
        pass
    assert tight.sleep() == 3
    assert cached_tokens(tight.pool, prompt(2, 2)) == 2 * BLOCK
    assert cached_tokens(tight.pool, prompt(3, 1)) == BLOCK  # the end of a prompt goes before its beginning
    tight.wake()
    assert tight.read(2, 2) == [2, 2]


def test_a_pool_without_dram_drops_all():
    for one in made(dram_blocks=0):
        one.store(3, name=1)
        assert one.sleep() == 0
        one.wake()
        assert len(one.pool.alloc(BLOCKS, evict=False)) == BLOCKS


def test_verbs_that_need_hbm_say_that_it_is_suspended(one):
    held = one.store(2, name=1)
    one.sleep()
    mine = one.pool.alloc(1, medium=DRAM)
    with one.pool.match(prompt(2, 1)) as hit:
        for call in (
            lambda: one.pool.alloc(1),
            lambda: one.pool.alloc(BLOCKS, evict=False),
            lambda: one.pool.swap_in(hit.addrs),
            lambda: one.pool.load(hit.addrs[:1], into=held[:1]),
            lambda: one.pool.copy(mine, into=held[:1]),
            lambda: one.pool.save(prompt(2, 3), held),
            lambda: one.pool.suspend(timeout=0),
        ):
            with refused(one.pool, kvpool.Suspended):
                call()
        with pytest.raises(kvpool.Suspended):  # which counts as a match
            one.pool.match(prompt(2, 1), into=HBM)
        swap = one.pool.swap_in(hit.addrs, wait=False)
        assert isinstance(swap.exception(), kvpool.Suspended)
        with refused(one.pool, kvpool.StaleAddress):
            one.pool.sequence(held)
    assert isinstance(kvpool.Suspended("text"), kvpool.StateError)
    mixed = one.pool.alloc(3, medium=MIXED)  # as far as DRAM goes
    assert {kvpool.decode_address(addr).medium for addr in mixed} == {DRAM}
    assert list(one.pool.swap_out(1)) == []
    one.pool.free(np.concatenate([mine, mixed]))
    one.wake()
    with refused(one.pool, kvpool.StateError, "not suspended"):
        one.pool.resume()


def test_addresses_from_before_stay_stale_after_it(one):
    mine = one.pool.alloc(2)
    one.pool.free(mine)
    one.sleep()
    one.wake()
    again = one.pool.alloc(2)
    assert kvpool.block_ids(again).tolist() == kvpool.block_ids(mine).tolist()
    with refused(one.pool, kvpool.StaleAddress):
        one.pool.free(mine)


def test_blocks_in_use_keep_it_awake_and_the_error_counts_them(one):
    mine = one.pool.alloc(2)
    one.store(3, name=1)
    one.store(1, name=2)
    seq = one.pool.sequence(mine[:1])
    with one.pool.match(prompt(3, 1)):
        with refused(one.pool, kvpool.Busy, "2 active, 3 pinned, 1 read", active=2, pinned=3, read=1, lent=0):
            one.sleep()
        assert len(one.pool.alloc(1)) == 1  # HBM is open again
    seq.close()
    assert not one.pool.suspended


def test_it_waits_for_what_is_in_use_and_gives_out_nothing_more_meanwhile(one):
    mine = one.pool.alloc(2)
    hit = one.pool.match(prompt(0, 1))
    began = threading.Event()
    moved: list[int] = []

    def sleep() -> None:
        began.set()
        moved.append(one.pool.suspend(timeout=60))

    thread = threading.Thread(target=sleep)
    thread.start()
    began.wait()
    while True:  # until it has begun
        try:
            one.pool.free(one.pool.alloc(1))
        except kvpool.Suspended:
            break
    with pytest.raises(kvpool.Suspended, match="being suspended"):
        one.pool.suspend(timeout=0)
    with one.pool.insert(prompt(2, 7), mine):  # what is in use may still be given to the index
        pass
    hit.close()
    thread.join(60)
    assert moved == [2]
    assert cached_tokens(one.pool, prompt(2, 7)) == 2 * BLOCK
    one.memory.unmap()
    one.wake()


def test_an_engine_that_allocates_frees_its_blocks_first():
    for one in made(engine_allocates=True):
        addrs = one.pool.adopt([5, 2])
        one.write(addrs, 4)
        one.pool.save(prompt(2, 1), addrs)
        with refused(one.pool, kvpool.Busy, active=2):
            one.sleep()
        one.pool.free(addrs)
        assert one.sleep() == 0
        with refused(one.pool, kvpool.Suspended):
            one.pool.adopt([1])
        one.wake()
        again = one.pool.adopt([5, 2])
        with one.pool.match(prompt(2, 1)) as hit:
            one.pool.load(hit.addrs, into=again)
        assert (one.memory.tensors[0][[5, 2]] == 4).all()


def test_memory_of_the_pool_stays_where_it_is():
    with small_pool() as pool:
        stamps = Stamps(pool)
        addrs = pool.alloc(2)
        stamps.write(addrs, [3, 4])
        with pool.insert(prompt(2), addrs):
            pass
        assert pool.suspend() == 2
        pool.resume()
        with pool.match(prompt(2), into=HBM) as hit:
            assert stamps.read(hit.addrs) == [3, 4]


def test_a_pool_without_hbm_has_nothing_to_suspend():
    with small_pool(hbm_blocks=0) as pool, refused(pool, kvpool.StateError, "no HBM"):
        pool.suspend()


def test_a_suspended_pool_can_be_closed(one):
    one.sleep()
    one.pool.close()
    with pytest.raises(kvpool.ClosedError):
        one.pool.resume()


def test_memory_that_network_adapters_have_registered_is_refused():
    for one in made(routes=("ucx", "sock")):
        with refused(one.pool, kvpool.Unsupported, "ucx"):
            one.pool.suspend()


def test_what_is_cached_in_dram_is_not_touched(one):
    store(one.pool, prompt(2, 1), medium=DRAM)
    one.sleep(keep=False)
    assert cached_tokens(one.pool, prompt(2, 1)) == 2 * BLOCK
    one.wake()


def test_what_is_cached_under_keys_is_not_touched_and_can_be_read_meanwhile(one):
    cache = _core.KeyedCache(one.pool, 2, 32)
    keys = ("a" * 64, "b" * 64)
    rows = np.arange(2 * cache.block_bytes, dtype=np.uint64).astype(np.uint8).reshape(2, -1)
    assert cache.put(keys, rows) == 2
    one.sleep(keep=False)
    read = np.zeros_like(rows)
    assert cache.get(keys, read) == 2
    assert (read == rows).all()
    mine = one.pool.stats().hbm
    assert mine.suspended == BLOCKS
    one.wake()
    cache.close()


def test_the_memory_of_a_rank_is_not_suspended_under_its_scheduler():
    layout = small_layout()
    with (
        Pool(layout, hbm_blocks=8, dram_blocks=8, parallel=kvpool.ParallelConfig(tp=1), huge_pages="never") as group,
        Pool(layout, hbm_blocks=8, dram_blocks=8, huge_pages="never") as memory,
    ):
        with kvpool.RankArena.join(group.ranks.export(0), memory=memory):
            group.alloc(3)
            with refused(memory, kvpool.StateError, "memory of a rank"):
                memory.suspend(timeout=0)
            with refused(group, kvpool.Busy, active=3):
                group.suspend(timeout=0)
        assert memory.suspend(timeout=0) == 0
        memory.resume()


def test_suspended_memory_joins_no_scheduler_but_for_its_dram():
    layout = small_layout()
    with (
        Pool(layout, hbm_blocks=8, dram_blocks=8, parallel=kvpool.ParallelConfig(tp=1), huge_pages="never") as group,
        Pool(layout, hbm_blocks=8, dram_blocks=8, huge_pages="never") as memory,
    ):
        memory.suspend(timeout=0)
        ticket = group.ranks.export(0)
        with pytest.raises(kvpool.StateError, match="suspended"):
            kvpool.RankArena.join(ticket, memory=memory)
        with kvpool.RankArena.join(ticket, memory=memory, only_dram=True):
            memory.resume()
            assert memory.suspend(timeout=0) == 0


def test_a_scheduler_with_network_adapters_is_refused_since_ranks_may_have_adopted_their_memory():
    how = {"parallel": kvpool.ParallelConfig(tp=1), "routes": ("ucx", "sock"), "huge_pages": "never"}
    with Pool(small_layout(), hbm_blocks=8, dram_blocks=8, **how) as group:
        with refused(group, kvpool.Unsupported, "ucx"):
            group.suspend(timeout=0)


def test_matches_that_come_and_go_meanwhile_lose_nothing():
    """Each block is in one tier, whole, whatever was matched while it was copied."""
    for one in made():
        for round_ in range(20):
            one.store(3, name=round_)
            stop = threading.Event()

            def match_all(pool: Pool = one.pool, done: threading.Event = stop, name: int = round_) -> None:
                while not done.is_set():
                    pool.match(prompt(3, name)).close()

            thread = threading.Thread(target=match_all)
            thread.start()
            try:
                one.pool.suspend(timeout=60)
                one.memory.unmap()
            finally:
                stop.set()
                thread.join()
            one.wake()
            assert one.read(round_, 3) == [round_] * 3
