"""save and load: copies between blocks that the caller holds and cached ones, for engines that allocate."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import kvpool
from kvpool import DRAM, HBM

LAYOUT = kvpool.KVLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
BLOCKS = 24


class Engine:
    """Has tensors and a free list for itself, as vLLM does; the pool follows it."""

    def __init__(self, dram_blocks=16, **options):
        self.layers = [np.zeros((2, BLOCKS, 2, 4, 8), np.float32) for _ in range(2)]
        self.pool = kvpool.Pool(
            LAYOUT, hbm=self.layers, block_dim=1, engine_allocates=True, dram_blocks=dram_blocks, audit=True, **options
        )

    def write(self, blocks, values):
        for layer, tensor in enumerate(self.layers):
            tensor[:, blocks] = np.asarray(values, np.float32)[None, :, None, None, None] + layer / 8

    def holds(self, blocks, values):
        wanted = np.asarray(values, np.float32)[None, :, None, None, None]
        return all((tensor[:, blocks] == wanted + layer / 8).all() for layer, tensor in enumerate(self.layers))


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.pool.audit()
    engine.pool.close()


def test_a_prompt_survives_the_reuse_of_its_blocks(engine):
    pool, prompt = engine.pool, np.arange(12)
    addrs = pool.adopt([5, 2, 7])
    engine.write([5, 2, 7], [1, 2, 3])
    assert pool.save(prompt, addrs) == 3
    pool.free(addrs)
    engine.write([5, 2, 7], [9, 9, 9])  # the next request, at once
    for into in ([0, 1, 3], [4, 5, 6]):  # again and again: what is cached stays where it is
        again = pool.adopt(into)
        with pool.match(prompt) as hit:
            assert hit.tokens == 12
            assert (kvpool.media(hit.addrs) == DRAM).all()
            assert pool.load(hit.addrs, again) == 3
        assert engine.holds(into, [1, 2, 3])
        engine.write(into, [7, 7, 7])
        pool.free(again)
    assert pool.stats().dram.historical == 3


def test_only_what_is_not_cached_is_copied(engine):
    pool = engine.pool
    addrs = pool.adopt(np.arange(6))
    engine.write(np.arange(6), np.arange(6))
    assert pool.save(np.arange(8), addrs[:2]) == 2
    engine.write([0, 1], [50, 51])  # not copied again: they are cached
    assert pool.save(np.arange(16), addrs[:4]) == 2
    assert pool.save(np.arange(16), addrs[:4]) == 0
    assert pool.save(np.r_[0:8, 100:104], addrs[[0, 1, 5]]) == 1
    back = pool.adopt(np.arange(10, 14))
    with pool.match(np.arange(16)) as hit:
        pool.load(hit.addrs, back)
    assert engine.holds(np.arange(10, 14), [0, 1, 2, 3])
    assert pool.stats().dram.historical == 5
    assert pool.save(np.arange(16), addrs[:4], namespace="tenant") == 4


def test_the_end_of_a_prompt_is_saved_behind_a_beginning_that_is_cached(engine):
    """As engines with a sliding window have it: they no longer hold the beginning."""
    pool = engine.pool
    addrs = pool.adopt(np.arange(6))
    engine.write(np.arange(6), np.arange(6))
    assert pool.save(np.arange(8), addrs[:2]) == 2
    assert pool.save(np.arange(16), addrs[2:4], first=2) == 2
    assert pool.save(np.arange(20), addrs[1:5], first=1) == 1  # blocks 1 to 3 are cached
    assert pool.save(np.arange(20), addrs[5:], first=4) == 0
    assert pool.save(np.arange(24), addrs[5:], first=5, wait=False).wait().result == 1
    back = pool.adopt(np.arange(10, 16))
    with pool.match(np.arange(24)) as hit:
        pool.load(hit.addrs, back)
    assert engine.holds(np.arange(10, 16), np.arange(6))


def test_the_end_of_a_prompt_is_not_saved_without_its_beginning(engine):
    pool = engine.pool
    addrs = pool.adopt(np.arange(6))
    assert pool.save(np.arange(8), addrs[:2]) == 2
    for wait in (True, False):
        with pytest.raises(kvpool.StateError, match=r"first 3 blocks .* only 2 are cached"):
            pool.save(np.arange(16), addrs[3:4], first=3, wait=wait)
    for first in (0, 3, 1 << 60):
        with pytest.raises(kvpool.ArgumentError, match=f"from block {first} on"):
            pool.save(np.arange(16), addrs[2:4], first=first)
    with pytest.raises(kvpool.ArgumentError):
        pool.save(np.arange(16), addrs[2:4], first=-1)
    assert pool.stats().dram.historical == 2
    pool.free(addrs)  # nothing is being read


def test_saving_makes_room_and_drops_the_coldest(engine):
    pool = engine.pool
    addrs = pool.adopt(np.arange(8))
    for prompt in range(4):
        engine.write(np.arange(8), [prompt] * 8)
        assert pool.save(np.arange(32) + 1000 * prompt, addrs) == 8
    assert [pool.explain_match(np.arange(32) + 1000 * n).matched_tokens for n in range(4)] == [0, 0, 32, 32]


def test_without_room_nothing_is_cached(engine):
    pool = engine.pool
    addrs = pool.adopt(np.arange(20))
    pool.save(np.arange(16), addrs[:4])
    with pool.match(np.arange(16)), pytest.raises(kvpool.OutOfBlocks):
        pool.save(np.arange(16 * 5) + 500, addrs)
    assert pool.explain_match(np.arange(16)).matched_tokens == 16
    assert pool.explain_match(np.arange(80) + 500).matched_tokens == 0
    pool.free(addrs)


def test_bad_arguments_change_nothing(engine):
    pool, prompt = engine.pool, np.arange(8)
    addrs = pool.adopt([1, 2])
    before = pool.stats()
    stale = pool.adopt([3])
    pool.free(stale)
    dram = pool.alloc(2, DRAM)
    for error, tokens, blocks in (
        (kvpool.ArgumentError, np.arange(7), addrs),
        (kvpool.ArgumentError, np.arange(12), addrs),
        (kvpool.ArgumentError, prompt, dram),
        (kvpool.ArgumentError, prompt, addrs[[0, 0]]),
        (kvpool.StaleAddress, prompt, np.r_[addrs[:1], stale]),
        (kvpool.ArgumentTypeError, "prompt", addrs),
    ):
        for wait in (True, False):
            with pytest.raises(error):
                pool.save(tokens, blocks, wait=wait)
    for error, blocks, into in (
        (kvpool.ArgumentError, dram, addrs[:1]),
        (kvpool.ArgumentError, dram, dram),
        (kvpool.ArgumentError, addrs, addrs),
        (kvpool.ArgumentError, dram, addrs[[0, 0]]),
        (kvpool.StaleAddress, dram, np.r_[addrs[:1], stale]),
    ):
        for wait in (True, False):
            with pytest.raises(error):
                pool.load(blocks, into, wait=wait)
    for call in (lambda s: pool.save(prompt, addrs, stream=s), lambda s: pool.load(dram, addrs, stream=s)):
        with pytest.raises(kvpool.ArgumentError, match="has no streams"):
            call(0)
    pool.free(dram)
    assert pool.stats().hbm == before.hbm
    assert pool.stats().dram == before.dram
    pool.free(addrs)


@pytest.mark.parametrize("wait", [True, False])
def test_an_engine_with_an_index_elsewhere_copies_both_ways_and_caches_nothing(engine, wait):
    pool = engine.pool
    mine, host = pool.adopt(np.arange(6)), pool.alloc(4, DRAM)
    engine.write(np.arange(4), [1, 2, 3, 4])

    def copied(*lists):
        copy = pool.copy(*lists, wait=wait)
        return copy if wait else copy.wait(10).result

    assert copied(mine[:4], host[[2, 0, 1, 3]]) == 4
    engine.write(np.arange(6), [9] * 6)
    assert copied(host[[0, 1, 2]], mine[[4, 1, 0]]) == 3
    assert engine.holds([0, 1, 2, 3, 4, 5], [1, 3, 9, 9, 2, 9])
    assert copied([], []) == 0
    stats = pool.stats()
    assert (stats.dram.active, stats.dram.historical) == (4, 0)
    with pool.insert(np.arange(8), host[[2, 0]]):  # cached blocks can be copied, and copied over never
        copied(host[[2]], mine[5:])
        assert engine.holds([5], [1])
        with pytest.raises(kvpool.StateError):
            copied(mine[:1], host[[2]])
    pool.free(np.r_[mine, host[[1, 3]]])


def test_a_copy_is_between_two_media(engine):
    pool = engine.pool
    mine, host = pool.adopt(np.arange(4)), pool.alloc(4, DRAM)
    for addrs, into in (
        (mine[:2], mine[2:]),
        (host[:2], host[2:]),
        (np.r_[mine[:1], host[:1]], host[1:3]),
        (host[:2], np.r_[mine[:1], host[:1]]),
        (mine[:2], host[:1]),
        (mine[:2], host[[1, 1]]),
        ([], host[:1]),
    ):
        for wait in (True, False):
            with pytest.raises(kvpool.ArgumentError):
                pool.copy(addrs, into, wait=wait)
    with pytest.raises(kvpool.ArgumentError):
        pool.load(mine[:2], host[:2])  # a load goes to HBM
    pool.free(np.r_[mine, host])


def test_a_pool_with_one_medium_says_so():
    with kvpool.Pool(LAYOUT, hbm_blocks=4) as pool:
        addrs = pool.alloc(1)
        with pytest.raises(kvpool.StateError, match="no DRAM"):
            pool.save(np.arange(4), addrs)
        with pytest.raises(kvpool.StateError, match="no DRAM"):
            pool.load(addrs, addrs)


def test_a_pool_that_allocates_its_own_blocks_copies_too():
    with kvpool.Pool(LAYOUT, hbm_blocks=4, dram_blocks=4, audit=True) as pool:
        addrs = pool.alloc(2)
        view = pool.tensor(HBM).numpy()
        view[kvpool.block_ids(addrs)] = 3
        assert pool.save(np.arange(8), addrs) == 2
        view[kvpool.block_ids(addrs)] = 4
        with pool.match(np.arange(8)) as hit:
            pool.load(hit.addrs, addrs)
        assert (view[kvpool.block_ids(addrs)] == 3).all()
        pool.free(addrs)


def test_in_the_background_an_engine_keeps_its_blocks_until_the_end(engine):
    pool = engine.pool
    addrs = pool.adopt(np.arange(4))
    engine.write(np.arange(4), [1, 2, 3, 4])
    saved = pool.save(np.arange(16), addrs, wait=False)
    assert saved.wait(10) is saved
    assert saved.done()
    assert saved.exception() is None
    assert saved.result == 4
    assert not saved.cancel()
    back = pool.adopt(np.arange(4, 8))
    with pool.match(np.arange(16)) as hit:
        loaded = pool.load(hit.addrs, back, wait=False)
        assert loaded.wait(10).result == 4
    assert engine.holds(np.arange(4, 8), [1, 2, 3, 4])
    pool.free(np.r_[addrs, back])


def test_coroutines_wait_for_copies(engine):
    pool = engine.pool
    addrs = pool.adopt(np.arange(4))

    async def both():
        saved = await pool.save(np.arange(16), addrs, wait=False)
        with pool.match(np.arange(16)) as hit:
            loaded = await pool.load(hit.addrs, addrs, wait=False)
        return saved.result, loaded.result

    assert asyncio.run(both()) == (4, 4)


def test_a_pool_that_closes_ends_its_copies():
    engine = Engine()
    addrs = engine.pool.adopt(np.arange(8))
    copies = [engine.pool.save(np.arange(32) + n, addrs, wait=False) for n in range(20)]
    engine.pool.close()
    for copy in copies:
        error = copy.exception(10)
        assert error is None or isinstance(error, kvpool.ClosedError)
    with pytest.raises(kvpool.ClosedError):
        engine.pool.save(np.arange(32), addrs)


@pytest.mark.parametrize("wait", [True, False])
def test_threads_that_save_the_same_prompts_cache_them_once(wait):
    engine = Engine(dram_blocks=32)
    pool, failures = engine.pool, []

    def work(first):
        try:
            mine = np.arange(first, first + 4)
            addrs = pool.adopt(mine)
            for turn in range(60):
                prompt = np.arange(16) + 100 * (turn % 12)
                engine.write(mine, np.arange(4) + 10 * (turn % 12))
                saved = pool.save(prompt, addrs, wait=wait)
                if not wait:
                    saved.wait(30)
                engine.write(mine, [-1] * 4)
                with pool.match(prompt) as hit:
                    n = len(hit.addrs)
                    pool.load(hit.addrs, addrs[:n])
                    if not engine.holds(mine[:n], (np.arange(4) + 10 * (turn % 12))[:n]):
                        failures.append(turn)
            pool.free(addrs)
        except Exception as error:  # to be seen in the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(4 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.stats().dram.active == 0
    pool.audit()
    pool.close()
