"""Blocks that are inserted before their content is there, and cached blocks that the pool is told to forget."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from kit import Stamps, cached_tokens, prompt, refused, small_pool, store

import kvpool
from kvpool import DRAM, HBM


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


# ---- forget


def test_what_is_forgotten_and_what_continues_it_is_found_no_more(pool):
    addrs = store(pool, prompt(4))
    assert pool.forget(addrs[2:3]) == 2
    assert cached_tokens(pool, prompt(4)) == 8
    assert pool.stats().hbm.free == 6
    assert pool.forget(addrs) == 2
    assert pool.forget(addrs) == 0
    assert pool.audit().hbm.free == 8


def test_a_match_keeps_what_is_forgotten_readable_until_it_is_closed(pool):
    addrs = store(pool, prompt(3))
    stamps = Stamps(pool)
    stamps.write(addrs, [5, 6, 7])
    with pool.match(prompt(3)) as hit:
        assert pool.forget(addrs[1:]) == 2
        assert cached_tokens(pool, prompt(3)) == 4
        store(pool, prompt(5, 1))
        with pytest.raises(kvpool.OutOfBlocks):
            pool.alloc(3, evict=False)
        assert stamps.read(hit.addrs) == [5, 6, 7]
        with refused(pool, kvpool.StateError, "forgotten", position=1):
            pool.swap_in(hit.addrs)
        with refused(pool, kvpool.StateError):
            pool.free(hit.addrs)
    assert pool.audit().hbm.historical == 6


def test_readers_of_events_learn_of_it_at_once(pool):
    addrs = store(pool, prompt(3))
    events = pool.subscribe()
    with pool.match(prompt(3)):
        pool.forget(addrs[1:])
        [removed] = events.drain()
        assert isinstance(removed, kvpool.RemovedEvent)
        assert removed.addrs.tolist() == addrs[1:].tolist()
    assert events.drain() == []


def test_forget_refuses_what_is_not_cached(pool):
    addrs = store(pool, prompt(2))
    mine = pool.alloc(1)
    with refused(pool, kvpool.StateError, position=1):
        pool.forget([addrs[0], mine[0]])
    with refused(pool, kvpool.ArgumentError):
        pool.forget([0])
    with refused(pool, kvpool.NotOwner):
        pool.forget([int(addrs[0]) | 7 << 50])
    for wrong in (None, 3, ["a"], [1.5]):
        with refused(pool, kvpool.ArgumentTypeError):
            pool.forget(wrong)


def test_a_match_that_is_dropped_while_its_blocks_are_forgotten_frees_them(pool):
    addrs = store(pool, prompt(2))
    hit = pool.match(prompt(2))
    pool.forget(addrs)
    del hit
    gc.collect()
    assert pool.audit().hbm.free == 8


# ---- content that is still to come


def test_a_prompt_is_matched_before_its_content_is_there(pool):
    addrs = pool.alloc(3, medium=DRAM)
    with pool.insert(prompt(3), addrs, filled=False) as inserted:
        assert inserted.inserted == 3
    assert pool.evict(8) == 0
    with pool.match(prompt(3)) as hit:
        assert hit.addrs.tolist() == addrs.tolist()
        into = pool.alloc(3)
        for call in (
            lambda: pool.copy(hit.addrs, into),
            lambda: pool.load(hit.addrs, into, wait=False),
            lambda: pool.swap_in(hit.addrs),
            lambda: pool.sequence(hit.addrs, 12),
        ):
            with refused(pool, kvpool.Busy, "to come", position=0):
                call()
        pool.filled(addrs[:1])
        with refused(pool, kvpool.Busy, position=1):
            pool.copy(hit.addrs, into)
        pool.filled(addrs[1:])
        assert pool.copy(hit.addrs, into) == 3
    assert pool.evict(8) == 3
    pool.audit()


def test_blocks_that_could_not_be_filled_are_forgotten_and_come_back_when_nobody_writes_to_them(pool):
    addrs = pool.alloc(8, medium=DRAM)
    pool.insert(prompt(8), addrs, filled=False).close()
    assert pool.forget(addrs[4:]) == 4
    assert cached_tokens(pool, prompt(8)) == 16
    with pytest.raises(kvpool.OutOfBlocks):
        pool.alloc(1, medium=DRAM)
    pool.filled(addrs)
    assert pool.stats().dram.free == 4
    assert pool.evict(8) == 4
    pool.audit()


def test_filled_is_all_or_nothing(pool):
    addrs = pool.alloc(3)
    pool.insert(prompt(2), addrs[:2], filled=False).close()
    with refused(pool, kvpool.StateError, "not being filled", position=1):
        pool.filled([addrs[0], addrs[0]])
    with refused(pool, kvpool.StateError, position=2):
        pool.filled(addrs)
    pool.filled(addrs[:2])
    with refused(pool, kvpool.StateError):
        pool.filled(addrs[:2])
    for wrong in (None, 3, ["a"], [1.5]):
        with refused(pool, kvpool.ArgumentTypeError):
            pool.filled(wrong)
    with refused(pool, kvpool.ArgumentTypeError):
        pool.insert(prompt(1, 1), addrs[2:], filled=1)


def test_a_save_of_what_others_are_filling_is_refused_until_it_is_there(pool):
    addrs = pool.alloc(2, medium=DRAM)
    pool.insert(prompt(2), addrs, filled=False).close()
    mine = pool.alloc(2)
    with refused(pool, kvpool.Busy, "to come"):
        pool.save(prompt(2), mine)
    assert cached_tokens(pool, prompt(2)) == 8
    assert pool.stats().dram.free == 6  # the copies are free again
    pool.filled(addrs)
    assert pool.save(prompt(2), mine) == 0
    assert np.array_equal(kvpool.media(mine), [HBM, HBM])


def test_what_was_forgotten_before_it_was_filled_is_never_read(pool):
    addrs = pool.alloc(2, medium=DRAM)
    mine = pool.alloc(2)
    with pool.insert(prompt(2), addrs, filled=False) as inserted:
        pool.filled(addrs[:1])
        pool.forget(addrs)
        pool.filled(addrs[1:])
        pool.load(addrs[:1], mine[:1])
        with refused(pool, kvpool.StateError, "before it was filled", position=1):
            pool.load(inserted.addrs, mine)
        with refused(pool, kvpool.StateError, "not being filled"):
            pool.filled(addrs[1:])
    assert pool.stats().dram.free == 8
    pool.audit()
