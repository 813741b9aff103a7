"""Loads and saves under way, and the end of a Storage."""

from __future__ import annotations

import asyncio
import os
import threading

import kit
import numpy as np
import pytest
from kit import cached_tokens, prompt, small_layout, small_pool
from storage_kit import LONG_S, MemoryStore, joined_to, saved_by, stamped

import kvpool
from kvpool.storage import DirectoryStore, Loaded


@pytest.fixture
def memory():
    return MemoryStore()


def test_a_load_can_be_cancelled_and_gives_its_blocks_back(memory):
    tokens = prompt(4)
    saved_by(memory, tokens, [1, 2, 3, 4])
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        memory.reads.clear()
        loading = storage.load(tokens, budget_s=LONG_S)
        assert memory.begun.acquire(timeout=60)
        assert not loading.done()
        assert loading.cancel()
        assert loading.done()
        assert not loading.cancel()
        with pytest.raises(kvpool.Cancelled):
            loading.wait()
        assert isinstance(loading.exception(), kvpool.Cancelled)
        memory.reads.set()
        storage.close()
        assert (pool.stats().dram.active, pool.stats().dram.pinned) == (0, 0)
        assert cached_tokens(pool, tokens) == 0


def test_a_save_can_be_cancelled(memory):
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        stamped(pool, prompt(4), [1, 2, 3, 4], medium=kvpool.DRAM)
        memory.writes.clear()
        saving = storage.save(prompt(4))
        assert memory.put_begun.acquire(timeout=60)
        assert saving.cancel()
        with pytest.raises(kvpool.Cancelled):
            saving.wait()
        memory.writes.set()
        assert storage.flush(LONG_S)
        assert len(memory.blocks) == 1
        assert pool.stats().dram.pinned == 0


def test_handles_can_be_awaited(memory):
    tokens = prompt(3)
    saved_by(memory, tokens, [1, 2, 3])

    async def both(storage):
        loaded = await storage.load(tokens, budget_s=LONG_S)
        saved = await storage.save(tokens)
        again = await asyncio.gather(*(storage.load(tokens) for _ in range(5)))
        return loaded, saved, again

    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        loaded, saved, again = asyncio.run(both(storage))
        assert (loaded.loaded_tokens, saved.present, {one.tokens for one in again}) == (12, 3, {12})


def test_cancelling_a_task_ends_the_waiting_and_not_the_load(memory):
    tokens = prompt(2)
    saved_by(memory, tokens, [1, 2])

    async def cancelled(storage):
        loading = storage.load(tokens, budget_s=LONG_S)
        task = asyncio.ensure_future(_awaited(loading))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return loading

    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        memory.reads.clear()
        loading = asyncio.run(cancelled(storage))
        assert not loading.done()
        memory.reads.set()
        assert loading.wait(LONG_S).loaded_tokens == 8


async def _awaited(handle):
    return await handle


def test_many_threads_load_and_save_at_once(tmp_path):
    prompts = [prompt(4, name=number) for number in range(8)]
    failures = []
    with DirectoryStore(tmp_path / "s") as where, small_pool(0, 16, device="cpu", audit=False) as pool:
        with joined_to(pool, where, write="always") as storage:

            def work(first):
                try:
                    for step in range(40):
                        tokens = prompts[(first + step) % 8]
                        loaded = storage.load(tokens, budget_s=LONG_S).wait()
                        if loaded.tokens < len(tokens):
                            with pool.match(tokens) as hit:
                                addrs = pool.alloc(4 - len(hit.addrs), medium=kvpool.DRAM)
                                kit.Stamps(pool).write(addrs, [int(-tokens[0])] * len(addrs))
                                both = np.concatenate([hit.addrs, addrs])
                                pool.insert(tokens, both, free_duplicates=True).close()
                        with pool.match(tokens) as hit:
                            assert set(kit.Stamps(pool).read(hit.addrs)) <= {int(-tokens[0])}
                except kvpool.OutOfBlocks:
                    pass  # others hold them all
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        assert failures == []
        pool.audit()
        assert (pool.stats().dram.active, pool.stats().dram.pinned) == (0, 0)


# ---- the end


def test_close_ends_loads_and_drops_saves_and_frees_what_they_had(memory):
    tokens, other = prompt(3), prompt(3, name=1)
    saved_by(memory, tokens, [1, 2, 3])
    with small_pool(0, 8, device="cpu") as pool:
        storage = joined_to(pool, memory)
        stamped(pool, other, [4, 5, 6], medium=kvpool.DRAM)
        memory.writes.clear()
        saves = [storage.save(other) for _ in range(3)]
        assert memory.put_begun.acquire(timeout=60)
        memory.reads.clear()
        loading = storage.load(tokens, budget_s=LONG_S)
        assert memory.begun.acquire(timeout=60)
        closing = threading.Thread(target=storage.close)
        closing.start()
        assert loading.wait(LONG_S) == Loaded(0, 0, late=True)
        memory.reads.set()
        memory.writes.set()
        closing.join(60)
        assert [type(one.exception(LONG_S)) for one in saves] == [kvpool.ClosedError] * 3
        assert (pool.stats().dram.active, pool.stats().dram.pinned) == (0, 0)
        storage.close()
        with pytest.raises(kvpool.ClosedError):
            storage.load(tokens)
        with pytest.raises(kvpool.ClosedError):
            storage.save(tokens)


def test_a_storage_outlives_its_pool(memory):
    tokens = prompt(3)
    saved_by(memory, tokens, [1, 2, 3])
    pool = small_pool(0, 8, device="cpu")
    storage = joined_to(pool, memory, write="always")
    memory.reads.clear()
    loading = storage.load(tokens, budget_s=LONG_S)
    assert memory.begun.acquire(timeout=60)
    pool.close()
    memory.reads.set()  # its memory is still there
    assert isinstance(loading.exception(LONG_S), kvpool.ClosedError)
    with pytest.raises(kvpool.ClosedError):
        storage.load(tokens)
    storage.close()


def test_a_forked_child_cannot_use_it(tmp_path):
    kit.run_script(
        "import os\n"
        "from kvpool.storage import DirectoryStore, Storage\n"
        f"where = DirectoryStore({str(tmp_path / 's')!r})\n"
        "pool = kit.small_pool(0, 4, device='cpu')\n"
        "storage = Storage(pool, where, model='m')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    code = 1\n"
        "    try:\n"
        "        storage.load([1, 2, 3, 4])\n"
        "    except kvpool.ForkError:\n"
        "        storage.close()\n"
        "        code = 0\n"
        "    os._exit(code)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "storage.close()\n"
        "pool.close()\n"
    )


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": ""}, kvpool.ArgumentError),
        ({"model": None}, kvpool.ArgumentError),
        ({"model": 3}, kvpool.ArgumentTypeError),
        ({"secret": b"s"}, kvpool.ArgumentTypeError),
        ({"write": "sometimes"}, kvpool.ArgumentError),
        ({"write": 3}, kvpool.ArgumentTypeError),
        ({"write_bytes_s": 0}, kvpool.ArgumentError),
        ({"write_bytes_s": "1GB"}, kvpool.ArgumentTypeError),
        ({"read_threads": 0}, kvpool.ArgumentError),
        ({"write_threads": 65}, kvpool.ArgumentError),
        ({"store_timeout_s": -1}, kvpool.ArgumentError),
        ({"rank_slice": 0}, kvpool.ArgumentTypeError),
    ],
)
def test_wrong_arguments_are_refused(memory, options, error):
    with small_pool(0, 4, device="cpu") as pool:
        before = threading.active_count()
        with pytest.raises(error):
            joined_to(pool, memory, **options)
        assert threading.active_count() == before


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        (("text",), {}, kvpool.ArgumentTypeError),
        (([1 << 40],), {}, kvpool.ArgumentError),
        (([1], 7), {}, kvpool.ArgumentTypeError),
        (([1],), {"budget_s": -1}, kvpool.ArgumentError),
        (([1],), {"budget_s": "1"}, kvpool.ArgumentTypeError),
    ],
)
def test_wrong_arguments_of_a_load_change_nothing(memory, arguments, options, error):
    with small_pool(0, 4, device="cpu") as pool, joined_to(pool, memory) as storage:
        with kit.refused(pool, error):
            storage.load(*arguments, **options)
        assert memory.calls == []


def test_pools_without_memory_here_are_refused(memory):
    layout = small_layout(order="discrete")
    tensors = [np.zeros((8, 2, 2, kit.BLOCK, 4), np.float32) for _ in range(layout.layers)]
    with kvpool.Pool(layout, hbm=tensors) as pool, pytest.raises(kvpool.Unsupported, match="dram_blocks"):
        joined_to(pool, memory)
    parallel = kvpool.ParallelConfig(tp=2)
    with kvpool.Pool(layout, 4, 4, parallel=parallel) as pool, pytest.raises(kvpool.StateError):
        joined_to(pool, memory)
    with pytest.raises(kvpool.ArgumentTypeError):
        joined_to(None, memory)
    with small_pool(0, 4, device="cpu") as pool, pytest.raises(kvpool.ArgumentTypeError):
        joined_to(pool, None)


def test_a_storage_leaves_no_thread_and_no_descriptor(memory):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, write="always") as storage:
        stamped(pool, prompt(2), [1, 2], medium=kvpool.DRAM)
        storage.save(prompt(2)).wait(LONG_S)
        storage.load(prompt(4), budget_s=LONG_S).wait()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)
