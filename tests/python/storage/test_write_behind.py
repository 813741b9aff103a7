"""What a Storage saves by itself, how fast, and what it counts."""

from __future__ import annotations

import logging
import threading
import time

import kit
import numpy as np
import pytest
from kit import prompt, small_layout, small_pool, store
from storage_kit import MemoryStore, files_of

import kvpool
from kvpool.storage import Always, ContentKeys, DirectoryStore, Storage
from kvpool.storage import saving as saving_module
from kvpool.storage import storage as storage_module
from kvpool.storage import write_behind as write_behind_module

LONG_S = 60.0


@pytest.fixture
def memory():
    return MemoryStore()


def joined_to(pool, where, write="on_second_use", **options):
    return Storage(pool, where, model="m", write=write, **options)


def keys_of(tokens, namespace=""):
    return ContentKeys(model="m", layout=small_layout()).of_tokens(tokens, namespace)


def test_always_saves_all_that_the_pool_stores(memory):
    with small_pool(8, 8, device="cpu") as pool:
        store(pool, prompt(2), namespace="before")
        with joined_to(pool, memory, "always") as storage:
            store(pool, prompt(3))
            store(pool, prompt(2, name=1), medium=kvpool.DRAM)
            assert storage.flush(LONG_S)
            assert set(memory.blocks) == {
                *keys_of(prompt(2), "before"), *keys_of(prompt(3)), *keys_of(prompt(2, name=1))
            }  # fmt: skip
            assert storage.stats().saved_blocks == 7


def test_what_is_used_once_is_not_saved_and_what_is_asked_for_again_is(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        store(pool, prompt(3), medium=kvpool.DRAM)
        store(pool, prompt(2, name=1), medium=kvpool.DRAM)
        assert storage.flush(LONG_S)
        assert memory.blocks == {}
        assert storage.load(prompt(3)).wait().tokens == 12
        assert storage.flush(LONG_S)
        assert set(memory.blocks) == set(keys_of(prompt(3)))


def test_what_was_computed_again_is_saved(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        store(pool, prompt(2), medium=kvpool.DRAM)
        assert storage.flush(LONG_S)
        pool.delete(prompt(2))
        assert memory.blocks == {}
        store(pool, prompt(2), medium=kvpool.DRAM)
        assert storage.flush(LONG_S)
        assert set(memory.blocks) == set(keys_of(prompt(2)))


def test_what_prompts_share_is_saved(memory):
    shared = prompt(2)
    with small_pool(0, 16, device="cpu") as pool, joined_to(pool, memory) as storage:
        for number in (7, 8):
            tokens = [*shared, number, 0, 0, 0]
            with pool.match(tokens) as hit:
                addrs = [*hit.addrs, *pool.alloc(3 - len(hit.addrs), medium=kvpool.DRAM)]
                pool.insert(tokens, addrs).close()
        assert storage.flush(LONG_S)
        assert set(memory.blocks) == set(keys_of(shared))


def test_never_saves_nothing_by_itself(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, "never") as storage:
        store(pool, prompt(2), medium=kvpool.DRAM)
        storage.load(prompt(2)).wait()
        assert storage.flush(LONG_S)
        assert memory.calls == []


def test_a_policy_of_the_application_chooses(memory):
    heard = []

    class Ends:
        """Saves the last block of each prompt."""

        def stored(self, keys, first):
            heard.append(("stored", len(keys), first))
            return [len(keys) - 1]

        def used(self, keys):
            heard.append(("used", len(keys)))
            return []

        def not_saved(self, keys):
            heard.append(("not saved", len(keys)))

    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, Ends()) as storage:
        store(pool, prompt(3), medium=kvpool.DRAM)
        assert storage.flush(LONG_S)
        assert set(memory.blocks) == {keys_of(prompt(3))[-1]}
        storage.load(prompt(3)).wait()
        assert storage.flush(LONG_S)
        memory.failure = kvpool.StoreFailed("full", errno=28)
        store(pool, prompt(2, name=1), medium=kvpool.DRAM)
        assert storage.flush(LONG_S)
        assert storage.flush(LONG_S)
        assert heard == [("stored", 3, 0), ("used", 3), ("stored", 2, 0), ("not saved", 1)]


def test_writing_behind_pins_nothing_and_what_was_evicted_is_left_out(memory):
    with small_pool(0, 4, device="cpu") as pool, joined_to(pool, memory, "always") as storage:
        memory.writes.clear()
        store(pool, prompt(2), medium=kvpool.DRAM)
        assert memory.put_begun.acquire(timeout=60)
        store(pool, prompt(2, name=1), medium=kvpool.DRAM)
        kept = pool.alloc(4, medium=kvpool.DRAM)  # evicts all
        memory.writes.set()
        assert storage.flush(LONG_S)
        stats = storage.stats()
        assert (stats.saved_blocks, stats.gone_blocks) == (2, 2)  # a copy of the first was under way
        assert set(memory.blocks) == set(keys_of(prompt(2)))
        pool.free(kept)


@pytest.mark.parametrize("layout", [small_layout(), kvpool.RawLayout(block_bytes=64, block_tokens=kit.BLOCK)], ids=str)
def test_a_block_whose_place_was_given_to_others_is_not_saved_under_its_key(memory, monkeypatch, layout):
    """Between the look at the index and the copy it is evicted, and its memory is written anew."""
    with small_pool(0, 2, layout, device="cpu") as pool, joined_to(pool, memory, "never") as storage:
        addrs = store(pool, prompt(2), medium=kvpool.DRAM)
        kit.Stamps(pool).write(addrs, [1, 2])
        blocks = storage._shared.memory
        is_unfilled, others = blocks._is_unfilled, []

        def late(address):
            unfilled = is_unfilled(address)
            if not others:
                pool.delete(prompt(2))
                others.extend(pool.alloc(2, medium=kvpool.DRAM))
                kit.Stamps(pool).write(others, [8, 9])
            return unfilled

        monkeypatch.setattr(blocks, "_is_unfilled", late)
        assert blocks.copies(prompt(2).astype("int64"), "", [0, 1]).found == {}
        pool.free(others)


def test_all_writers_count_in_the_budget(memory, monkeypatch):
    """Saves by name and saves by the policy, on several threads: 512 bytes a block."""
    slept = []
    monkeypatch.setattr(saving_module.time, "sleep", lambda seconds: slept.append(seconds) or _advance(seconds))
    clock = [time.monotonic()]

    def _advance(seconds):
        clock[0] += seconds

    monkeypatch.setattr(saving_module.time, "monotonic", lambda: clock[0])
    with small_pool(0, 32, device="cpu") as pool:
        with joined_to(pool, memory, "always", write_bytes_s=512 * 4, write_threads=1) as storage:
            begin = clock[0]
            for number in range(4):
                store(pool, prompt(4, name=number), medium=kvpool.DRAM)
                assert storage.save(prompt(4, name=number)).wait(LONG_S).saved in (0, 4)
            assert storage._behind.flush(clock[0] + LONG_S)
            assert storage._shared.writers.wait_idle(clock[0] + LONG_S)
            assert storage.stats().saved_blocks == 16
            # 16 blocks at 4 a second, of which the first 4 go at once.
            assert 3 <= clock[0] - begin < 3.5


def test_too_many_saves_are_dropped_and_counted(memory, monkeypatch):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, "always") as storage:
        monkeypatch.setattr(storage._shared.writers, "_waiting_max", kit.BLOCK)
        memory.writes.clear()
        store(pool, prompt(1), medium=kvpool.DRAM)
        assert memory.put_begun.acquire(timeout=60)
        for number in range(1, 4):
            store(pool, prompt(1, name=number), medium=kvpool.DRAM)
        assert storage._behind.flush(time.monotonic() + LONG_S)
        assert storage.stats().dropped_blocks == 2
        with pytest.raises(kvpool.StoreFailed, match="too many"):
            storage.save(prompt(1)).wait(LONG_S)
        memory.writes.set()
        assert storage.flush(LONG_S)
        assert storage.stats().saved_blocks == 2


def test_what_was_not_saved_is_saved_at_its_next_use(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        store(pool, prompt(2), medium=kvpool.DRAM)
        memory.failure = kvpool.StoreFailed("full", errno=28)
        assert storage.flush(LONG_S)
        storage.load(prompt(2)).wait()
        assert storage.flush(LONG_S)
        assert storage.stats().dropped_blocks == 2
        memory.failure = None
        assert storage.flush(LONG_S)
        storage.load(prompt(2)).wait()
        assert storage.flush(LONG_S)
        assert len(memory.blocks) == 2


def until(true) -> bool:
    end = time.monotonic() + LONG_S
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    return true()


def test_what_was_evicted_before_its_turn_is_saved_at_its_next_use(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        store(pool, prompt(2), medium=kvpool.DRAM)
        assert storage.flush(LONG_S)
        exists, gate = memory.exists, threading.Event()
        memory.exists = lambda keys, *, timeout=None: gate.wait(60) and exists(keys)
        storage._behind.used(np.asarray(prompt(2), np.int64), "", 2)
        assert storage._behind.flush(time.monotonic() + LONG_S)
        pool.delete(prompt(2))
        gate.set()
        assert storage.flush(LONG_S)
        assert storage.stats().gone_blocks == 2
        store(pool, prompt(2), medium=kvpool.DRAM)
        assert storage.flush(LONG_S)
        assert set(memory.blocks) == set(keys_of(prompt(2)))


def test_what_the_store_has_lost_is_saved_when_it_comes_again(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        store(pool, prompt(3), medium=kvpool.DRAM)
        storage.load(prompt(3)).wait()
        assert storage.flush(LONG_S)
        assert len(memory.blocks) == 3
        del memory.blocks[keys_of(prompt(3))[1]]
        pool.delete(prompt(3))
        assert storage.load(prompt(3), budget_s=LONG_S).wait().tokens == 4
        pool.delete(prompt(3))
        assert storage.flush(LONG_S)
        store(pool, prompt(3), medium=kvpool.DRAM)
        assert storage.flush(LONG_S)
        assert set(memory.blocks) == set(keys_of(prompt(3)))


def test_what_a_read_finds_damaged_is_saved_when_it_comes_again(tmp_path):
    with DirectoryStore(tmp_path / "s") as where, small_pool(0, 8, device="cpu") as pool:
        with joined_to(pool, where) as storage:
            store(pool, prompt(2), medium=kvpool.DRAM)
            storage.load(prompt(2)).wait()
            assert storage.flush(LONG_S)
            for file in files_of(where):
                file.write_bytes(file.read_bytes()[:-1] + b"x")
            pool.delete(prompt(2))
            assert storage.load(prompt(2), budget_s=LONG_S).wait().tokens == 0
            assert files_of(where) == []
            assert storage.flush(LONG_S)
            store(pool, prompt(2), medium=kvpool.DRAM)
            assert storage.flush(LONG_S)
            assert where.exists(keys_of(prompt(2))) == [True, True]


def test_what_found_no_room_to_wait_is_saved_at_its_next_use(memory, monkeypatch):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        monkeypatch.setattr(storage._shared.writers, "_waiting_max", kit.BLOCK)
        memory.writes.clear()
        for number in range(4):
            store(pool, prompt(1, name=number), medium=kvpool.DRAM)
            storage.load(prompt(1, name=number)).wait()
        assert storage._behind.flush(time.monotonic() + LONG_S)
        assert storage.stats().dropped_blocks >= 2
        memory.writes.set()
        assert storage.flush(LONG_S)
        for number in range(4):
            storage.load(prompt(1, name=number)).wait()
            assert storage.flush(LONG_S)
        assert len(memory.blocks) == 4


@pytest.mark.parametrize("layout", [small_layout(), kvpool.RawLayout(block_bytes=64, block_tokens=kit.BLOCK)], ids=str)
@pytest.mark.parametrize("write", ["always", "on_second_use"])
def test_what_is_filled_later_is_saved_then(memory, write, layout):
    """Its event comes before its content."""
    with small_pool(0, 8, layout, device="cpu") as pool, joined_to(pool, memory, write) as storage:
        addrs = pool.alloc(2, medium=kvpool.DRAM)
        held = pool.insert(prompt(2), addrs, filled=False)
        storage.load(prompt(2)).wait()
        assert until(lambda: len(storage._behind._put_off) > 0)
        assert storage.flush(LONG_S)
        assert memory.blocks == {}
        kit.Stamps(pool).write(addrs, [5, 6])
        pool.filled(held.addrs)
        held.close()
        assert until(lambda: len(memory.blocks) == 2)
        assert storage.stats().gone_blocks == 0
        assert storage.flush(LONG_S)
    with small_pool(0, 8, layout, device="cpu") as pool, joined_to(pool, memory) as storage:
        assert storage.load(prompt(2), budget_s=LONG_S).wait().tokens == 8
        with pool.match(prompt(2)) as hit:
            assert kit.Stamps(pool).read(hit.addrs) == [5, 6]


def test_what_is_never_filled_is_left_in_the_end(memory, monkeypatch):
    monkeypatch.setattr(write_behind_module, "SAVED_WITHIN_S", 0.3)
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, "always") as storage:
        pool.insert(prompt(2), pool.alloc(2, medium=kvpool.DRAM), filled=False).close()
        assert until(lambda: storage.stats().gone_blocks == 2)
        assert not storage._behind._put_off


def test_a_policy_that_fails_is_counted_and_asked_again(memory, caplog):
    """Also by an answer that names blocks that there are not."""

    class Fails(Always):
        def stored(self, keys, first):
            answers.append(len(keys))
            if len(answers) == 1:
                raise ValueError("a bug in a policy")
            return [7] if len(answers) == 2 else super().stored(keys, first)

    answers = []
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, Fails()) as storage:
        with caplog.at_level(logging.WARNING, "kvpool.storage"):
            for number in range(3):
                store(pool, prompt(2, name=number), medium=kvpool.DRAM)
                assert storage.flush(LONG_S)
        assert answers == [2, 2, 2]
        assert set(memory.blocks) == set(keys_of(prompt(2, name=2)))
        assert storage.stats().policy_errors == 2
        assert [record.getMessage().count("a bug in a policy") for record in caplog.records] == [1]


def test_a_policy_that_hangs_holds_close_up_for_a_moment_only(memory, monkeypatch):
    monkeypatch.setattr(storage_module, "_JOIN_S", 0.1)
    gate, asked = threading.Event(), threading.Event()

    class Hangs(Always):
        def stored(self, keys, first):
            asked.set()
            gate.wait(60)
            return []

    with small_pool(0, 8, device="cpu") as pool:
        storage = joined_to(pool, memory, Hangs())
        store(pool, prompt(2), medium=kvpool.DRAM)
        assert asked.wait(60)
        closing = threading.Thread(target=storage.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        gate.set()
        storage._behind._thread.join()


def test_a_pool_that_is_closed_ends_the_writing_behind(memory):
    pool = small_pool(0, 8, device="cpu")
    with joined_to(pool, memory, "always") as storage:
        pool.close()
        assert storage.flush(LONG_S)


def test_a_flush_that_is_not_done_in_time_says_so(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, "always") as storage:
        memory.writes.clear()
        store(pool, prompt(1), medium=kvpool.DRAM)
        assert memory.put_begun.acquire(timeout=60)
        assert not storage.flush(0.2)
        memory.writes.set()
        assert storage.flush(LONG_S)


def test_a_prompt_is_kept_by_the_store_and_comes_back_after_it_was_evicted(tmp_path):
    """From one end to the other, as an engine meets it."""
    with DirectoryStore(tmp_path / "s") as where, small_pool(0, 4, device="cpu") as pool:
        with joined_to(pool, where, "always") as storage:
            for number in range(6):
                addrs = pool.alloc(2, medium=kvpool.DRAM)
                kit.Stamps(pool).write(addrs, [10 + number, 20 + number])
                pool.insert(prompt(2, name=number), addrs).close()
                assert storage.flush(LONG_S)
            assert kit.cached_tokens(pool, prompt(2)) == 0
            for number in range(6):
                assert storage.load(prompt(2, name=number), budget_s=LONG_S).wait().tokens == 8
                with pool.match(prompt(2, name=number)) as hit:
                    assert kit.Stamps(pool).read(hit.addrs) == [10 + number, 20 + number]
            pool.audit()
