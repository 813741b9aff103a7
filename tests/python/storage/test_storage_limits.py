"""Deadlines, the breakers and the bounds of a pool with a store: what a caller has asked for is what it waits."""

from __future__ import annotations

import threading
import time

import kit
import pytest
from kit import prompt, small_pool
from storage_kit import LONG_S, MemoryStore, joined_to, saved_by, stamped, stamps_of

import kvpool
from kvpool.storage import Loaded, Saved
from kvpool.storage import budget as budget_module
from kvpool.storage import loading as loading_module

RAW = kvpool.RawLayout(block_bytes=64, block_tokens=kit.BLOCK)


@pytest.fixture
def memory():
    return MemoryStore()


def free_again(pool) -> bool:
    """Whether all pins and blocks are given back, soon."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        stats = pool.stats().dram
        if stats.pinned == stats.active == 0:
            return True
        time.sleep(0.001)
    return False


class Honest(MemoryStore):
    """Is gone, and keeps each deadline: its calls raise when their time has passed."""

    def __init__(self, gone="exists"):
        super().__init__()
        self.gone = gone

    def exists(self, keys, *, timeout=None):
        if self.gone == "exists":
            _passed(timeout)
        return [True] * len(keys)

    def get(self, keys, into, *, timeout=None):
        return _passed(timeout)

    def put(self, keys, contents, *, timeout=None):
        return _passed(timeout)


def _passed(timeout):
    time.sleep(timeout)
    raise kvpool.DeadlineExceeded("the store is gone")


# ---- saves


def test_a_save_ends_at_its_deadline_though_the_store_hangs_and_its_pins_with_it(memory):
    with small_pool(0, 4, device="cpu") as pool, joined_to(pool, memory) as storage:
        stamped(pool, prompt(2), [1, 2], medium=kvpool.DRAM)
        stamped(pool, prompt(2, name=1), [3, 4], medium=kvpool.DRAM)
        memory.writes.clear()
        running = storage.save(prompt(2), timeout=0.3)
        assert memory.put_begun.acquire(timeout=60)
        queued = storage.save(prompt(2, name=1), timeout=0.3)
        for saving in (running, queued):
            assert isinstance(saving.exception(LONG_S), kvpool.DeadlineExceeded)
            assert saving.done()
        assert free_again(pool)
        pool.free(pool.alloc(4, medium=kvpool.DRAM))  # all of them, while the store still hangs
        assert storage.stats().dropped_blocks == 4
        memory.writes.set()


def test_what_hangs_in_a_store_is_a_copy(memory):
    """Its block is somebody else's by then."""
    put, held = memory.put, []

    def keeps(keys, contents, *, timeout=None):
        held.extend(contents)
        return put(keys, contents, timeout=timeout)

    memory.put = keeps
    with small_pool(0, 2, RAW, device="cpu") as pool, joined_to(pool, memory) as storage:
        stamped(pool, prompt(1), [1], medium=kvpool.DRAM)
        memory.writes.clear()
        saving = storage.save(prompt(1))
        assert memory.put_begun.acquire(timeout=60)
        before = bytes(held[0][0])
        assert saving.cancel()
        assert free_again(pool)
        others = pool.alloc(2, medium=kvpool.DRAM)
        kit.Stamps(pool).write(others, [8, 9])
        assert bytes(held[0][0]) == before
        memory.writes.set()
        pool.free(others)


def test_cancel_and_close_give_pins_back_at_once(memory):
    with small_pool(0, 4, device="cpu") as pool:
        storage = joined_to(pool, memory)
        stamped(pool, prompt(2), [1, 2], medium=kvpool.DRAM)
        memory.writes.clear()
        cancelled, closed = storage.save(prompt(2)), storage.save(prompt(2))
        assert memory.put_begun.acquire(timeout=60)
        assert cancelled.cancel()
        assert pool.stats().dram.pinned == 2
        closing = threading.Thread(target=storage.close)
        closing.start()
        assert isinstance(closed.exception(LONG_S), kvpool.ClosedError)
        assert free_again(pool)
        memory.writes.set()
        closing.join()


def test_a_deadline_of_the_caller_says_nothing_about_the_store():
    where = Honest(gone="put")
    where.exists = lambda keys, *, timeout=None: [False] * len(keys)
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, where) as storage:
        stamped(pool, prompt(1), [1], medium=kvpool.DRAM)
        for _ in range(4):
            assert isinstance(storage.save(prompt(1), timeout=0.05).exception(LONG_S), kvpool.DeadlineExceeded)
        assert storage.flush(LONG_S)
        assert (storage.stats().write_errors, storage.stats().writing_off) == (0, False)


def test_a_store_that_keeps_its_own_deadline_has_failed(memory):
    """The deadline of a call that no caller waits for is long enough for a store that is well."""
    where = Honest(gone="put")
    where.exists = lambda keys, *, timeout=None: [False] * len(keys)
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, where, store_timeout_s=0.01) as storage:
        stamped(pool, prompt(1), [1], medium=kvpool.DRAM)
        for _ in range(3):
            assert isinstance(storage.save(prompt(1)).exception(LONG_S), kvpool.StoreFailed)
        assert storage.stats().writing_off


def test_a_question_does_not_switch_writing_on_again(memory):
    """A disk that is full answers them all."""
    there, other = prompt(2), prompt(2, name=1)
    saved_by(memory, there, [1, 2])
    put = memory.put

    def full(*_, **__):
        raise kvpool.StoreFailed("full", errno=28)

    memory.put = full
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        stamped(pool, there, [1, 2], medium=kvpool.DRAM)
        stamped(pool, other, [3, 4], medium=kvpool.DRAM)
        for _ in range(3):
            storage.save(other).exception(LONG_S)
        storage._shared.writing._until = 0.0  # the pause has passed
        assert storage.save(there).wait(LONG_S).present == 2
        assert storage.stats().writing_off
        memory.put = put
        storage._shared.writing._until = 0.0
        assert storage.save(other).wait(LONG_S).saved == 2
        assert not storage.stats().writing_off


def test_loads_without_an_end_hold_a_save_up_for_a_moment_only(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        stamped(pool, prompt(2), [1, 2], medium=kvpool.DRAM)
        storage._shared.reads_first.begin()  # as if there always were another one
        assert storage.save(prompt(2)).wait(LONG_S).saved == 2
        storage._shared.reads_first.end()


def test_what_was_not_written_is_not_taken_from_the_budget(memory):
    """Saves that end while they wait for it: 64 bytes a block, one a second."""
    with small_pool(0, 16, RAW, device="cpu") as pool, joined_to(pool, memory, write_bytes_s=64) as storage:
        stamped(pool, prompt(8), range(8), medium=kvpool.DRAM)
        for _ in range(4):
            assert isinstance(storage.save(prompt(8), timeout=0.1).exception(LONG_S), kvpool.DeadlineExceeded)
        assert storage.flush(LONG_S)
        assert storage._shared.budget.take(0) <= 1.0


# ---- loads


@pytest.mark.parametrize("gone", ["exists", "get"])
def test_a_store_that_is_gone_and_keeps_deadlines_is_taken_for_gone(gone):
    """Its calls end at the moment when the load does."""
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, Honest(gone)) as storage:
        for number in range(20):  # three, unless the machine gives the reader no time
            assert storage.load(prompt(2, name=number), budget_s=0.1).wait(LONG_S) == Loaded(0, 0, late=True)
            if storage.stats().reading_off:
                break
        assert storage.stats().reading_off
        assert storage.load(prompt(2), budget_s=LONG_S).wait() == Loaded(0, 0, late=False)
        assert storage.stats().skipped_loads == 1


def test_one_load_is_one_failure(memory, monkeypatch):
    tokens = prompt(8)
    saved_by(memory, tokens, range(8))

    def broken(*_, **__):
        raise OSError(5, "Input/output error")

    memory.get = broken
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        monkeypatch.setattr(storage._shared.memory, "batch_blocks", 1)
        storage.load(tokens, budget_s=LONG_S).wait()
        assert storage.stats().read_errors == 8
        assert not storage.stats().reading_off
        for _ in range(2):
            storage.load(tokens, budget_s=LONG_S).wait()
        assert storage.stats().reading_off


def test_a_budget_of_nothing_says_nothing_about_the_store(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        for number in range(5):
            storage.load(prompt(2, name=number), budget_s=0).wait(LONG_S)
        assert not storage.stats().reading_off


def test_a_load_that_waited_for_its_turn_says_nothing_about_the_store(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, read_threads=1) as storage:
        gate, begun = threading.Event(), threading.Event()
        storage._shared.readers.submit(lambda: (begun.set(), gate.wait(60)), lambda: None)
        assert begun.wait(60)
        for number in range(4):
            assert storage.load(prompt(2, name=number), budget_s=0.05).wait(LONG_S).late
        assert not storage.stats().reading_off
        gate.set()


@pytest.mark.parametrize("honest", [True, False])
def test_blocks_that_came_before_the_deadline_are_kept(memory, honest, monkeypatch):
    """Of a part that is read in one call, all that was read: the store says what came."""
    tokens = prompt(6)
    saved_by(memory, tokens, range(6))
    monkeypatch.setattr(loading_module, "_MARGIN_MAX_S", 1.0)  # room for a machine that is slow

    def slow(keys, into, *, timeout=None):
        until = time.monotonic() + timeout
        for number, (one, pieces) in enumerate(zip(keys, into, strict=True)):
            if number == 3:
                time.sleep(max(0.0, until - time.monotonic()))
                if not honest:
                    raise kvpool.DeadlineExceeded("3 of 6")
                return [True] * 3 + [False] * 3
            pieces[0][:] = memory.blocks[one]
        raise AssertionError

    memory.get = slow
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        loaded = storage.load(tokens, budget_s=2).wait(LONG_S)
        assert loaded == (Loaded(12, 12, late=True) if honest else Loaded(0, 0, late=True))
        assert stamps_of(pool, tokens) == ([0, 1, 2] if honest else [])
        assert not storage.stats().reading_off
        assert free_again(pool)


def test_a_load_is_spread_over_the_readers(memory, monkeypatch):
    tokens = prompt(8)
    saved_by(memory, tokens, range(8))
    monkeypatch.setattr(loading_module, "_PART_BYTES_MIN", 1)
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, read_threads=4) as storage:
        assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 32
        assert stamps_of(pool, tokens) == [*range(8)]
        assert [count for name, count in memory.calls if name == "get"] == [2] * 4


# ---- a store of the application, with bugs


ANSWERS = {"too few": [], "too many": [True] * 9, "none": None, "a number": 3}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("call", ["exists", "get", "put"])
def test_a_wrong_answer_of_a_store_is_a_failure_of_it(memory, call, answer):
    tokens = prompt(2)
    saved_by(memory, tokens, [1, 2])
    setattr(memory, call, lambda *_, **__: answer)
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        if call != "put":
            assert storage.load(tokens, budget_s=LONG_S).wait() == Loaded(0, 0, late=False)
            assert storage.stats().read_errors == 1
        stamped(pool, prompt(2, name=1), [3, 4], medium=kvpool.DRAM)
        saving = storage.save(prompt(2, name=1))
        if call == "get":
            assert saving.wait(LONG_S) == Saved(2, 0, 0)
        else:
            assert isinstance(saving.exception(LONG_S), kvpool.StoreFailed)
        assert free_again(pool)


def test_a_budget_takes_back_what_was_not_written():
    now = [0.0]
    budget = budget_module.ByteBudget(100, lambda: now[0])
    assert budget.take(300) == 2.0
    budget.give_back(200)
    assert budget.take(0) == 0.0
