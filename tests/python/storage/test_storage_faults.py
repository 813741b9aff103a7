"""A pool with a store that is slow, gone or full: no request fails by it, or waits longer than its budget."""

from __future__ import annotations

import logging
import time

import pytest
from kit import cached_tokens, prompt, small_pool
from storage_kit import LONG_S, MemoryStore, joined_to, saved_by, stamped, stamps_of

import kvpool
from kvpool.storage import Loaded
from kvpool.storage import saving as saving_module


@pytest.fixture
def memory():
    return MemoryStore()


def test_a_slow_store_costs_the_budget_and_its_blocks_stay_its_own_until_the_read_has_ended(memory):
    """Blocks that a late read still writes to are nobody else's."""
    tokens, other = prompt(4), prompt(4, name=1)
    saved_by(memory, tokens, [1, 2, 3, 4])
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        memory.reads.clear()
        loading = storage.load(tokens, budget_s=0.2)
        assert memory.begun.acquire(timeout=60)
        assert loading.wait(LONG_S) == Loaded(tokens=0, loaded_tokens=0, late=True)
        assert pool.stats().dram.active == 4
        with pytest.raises(kvpool.OutOfBlocks):
            pool.alloc(5, medium=kvpool.DRAM)
        stamped(pool, other, [5, 6, 7, 8], medium=kvpool.DRAM)
        memory.reads.set()
        assert memory.ended.acquire(timeout=60)
        until = time.monotonic() + 60
        while pool.stats().dram.active and time.monotonic() < until:
            time.sleep(0.001)
        assert pool.stats().dram.active == 0
        assert cached_tokens(pool, tokens) == 0  # what comes late is dropped
        assert stamps_of(pool, other) == [5, 6, 7, 8]
        stats = storage.stats()
        assert (stats.loads_late, stats.late_blocks, stats.loaded_blocks) == (1, 4, 0)
        pool.audit()


def test_what_has_come_within_the_budget_is_kept(memory, monkeypatch):
    """The second part is late; the first has come."""
    tokens = prompt(4)
    saved_by(memory, tokens, [1, 2, 3, 4])
    get, first = memory.get, next(iter(memory.blocks))

    def second_is_slow(keys, into, *, timeout=None):
        memory.reads.set() if first in keys else memory.reads.clear()
        return get(keys, into, timeout=timeout)

    memory.get = second_is_slow
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, read_threads=1) as storage:
        monkeypatch.setattr(storage._shared.memory, "batch_blocks", 2)
        assert storage.load(tokens, budget_s=0.5).wait(LONG_S) == Loaded(tokens=8, loaded_tokens=8, late=True)
        assert stamps_of(pool, tokens) == [1, 2]
        memory.reads.set()


def test_several_parts_are_read_and_kept_in_order(memory, monkeypatch):
    tokens = prompt(7)
    saved_by(memory, tokens, [1, 2, 3, 4, 5, 6, 7])
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        monkeypatch.setattr(storage._shared.memory, "batch_blocks", 2)
        assert storage.load(tokens, budget_s=LONG_S).wait().loaded_tokens == 28
        assert stamps_of(pool, tokens) == [1, 2, 3, 4, 5, 6, 7]
        assert [count for name, count in memory.calls if name == "get"].count(2) == 3


def test_a_store_that_keeps_failing_is_left_alone_for_a_while(memory, caplog):
    memory.failure = kvpool.StoreFailed("gone", errno=116)
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        with caplog.at_level(logging.WARNING, "kvpool.storage"):
            for _ in range(10):
                assert storage.load(prompt(2), budget_s=LONG_S).wait() == Loaded(0, 0, late=False)
        assert len(memory.calls) == 3
        stats = storage.stats()
        assert (stats.read_errors, stats.skipped_loads, stats.reading_off) == (3, 7, True)
        assert [record.getMessage().count("switched off") for record in caplog.records] == [0, 1]
        memory.failure = None
        storage._shared.reading._until = 0.0  # the pause has passed
        storage.load(prompt(2), budget_s=LONG_S).wait()
        assert not storage.stats().reading_off


def test_a_store_that_raises_anything_fails_no_load(memory):
    memory.failure = RuntimeError("a bug in an adapter")
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        assert storage.load(prompt(2), budget_s=LONG_S).wait().tokens == 0
        stamped(pool, prompt(2), [1, 2], medium=kvpool.DRAM)
        with pytest.raises(kvpool.StoreFailed, match="a bug in an adapter"):
            storage.save(prompt(2)).wait(LONG_S)


def test_reading_goes_on_while_writing_is_switched_off(memory):
    tokens = prompt(2)
    saved_by(memory, tokens, [1, 2])
    put = memory.put

    def full(*_, **__):
        raise kvpool.StoreFailed("full", errno=28)

    memory.put = full
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        other = prompt(2, name=1)
        stamped(pool, other, [3, 4], medium=kvpool.DRAM)
        for _ in range(4):
            assert isinstance(storage.save(other).exception(LONG_S), kvpool.StoreFailed)
        stats = storage.stats()
        assert (stats.write_errors, stats.dropped_blocks, stats.writing_off, stats.reading_off) == (3, 8, True, False)
        assert storage.load(tokens, budget_s=LONG_S).wait().loaded_tokens == 8
        memory.put = put
        storage._shared.writing._until = 0.0
        assert storage.save(other).wait(LONG_S).saved == 2
        assert not storage.stats().writing_off


def test_writers_wait_while_a_load_reads(memory, monkeypatch):
    monkeypatch.setattr(saving_module, "_STEP_S", LONG_S)
    tokens, other = prompt(2), prompt(2, name=1)
    saved_by(memory, tokens, [1, 2])
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        stamped(pool, other, [3, 4], medium=kvpool.DRAM)
        memory.reads.clear()
        memory.calls.clear()
        loading = storage.load(tokens, budget_s=LONG_S)
        assert memory.begun.acquire(timeout=60)
        saving = storage.save(other)
        with pytest.raises(kvpool.DeadlineExceeded):
            saving.wait(0.2)
        assert ("put", 1) not in memory.calls
        memory.reads.set()
        assert loading.wait(LONG_S).loaded_tokens == 8
        assert saving.wait(LONG_S).saved == 2


def test_a_load_that_is_late_no_longer_keeps_writers_waiting(memory):
    tokens, other = prompt(2), prompt(2, name=1)
    saved_by(memory, tokens, [1, 2])
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        stamped(pool, other, [3, 4], medium=kvpool.DRAM)
        memory.reads.clear()
        assert storage.load(tokens, budget_s=0.1).wait(LONG_S).late
        assert storage.save(other).wait(LONG_S).saved == 2
        memory.reads.set()
