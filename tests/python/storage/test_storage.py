"""A pool with a store: save and load."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
import time

import kit
import numpy as np
import pytest
from kit import cached_tokens, prompt, small_layout, small_pool, store
from storage_kit import MemoryStore

import kvpool
from kvpool.storage import DirectoryStore, Loaded, Saved, Storage

LONG_S = 60.0  # a budget that a test never spends


@pytest.fixture
def memory():
    return MemoryStore()


def joined_to(pool, where, **options):
    return Storage(pool, where, **{"model": "m", "write": "never"} | options)


def stamped(pool, tokens, stamps, **options):
    """Caches a prompt whose blocks have these stamps."""
    addrs = store(pool, tokens, **options)
    kit.Stamps(pool).write(addrs, stamps)
    return addrs


def stamps_of(pool, tokens, namespace=""):
    with pool.match(tokens, namespace) as hit:
        return kit.Stamps(pool).read(hit.addrs)


def saved_by(where, tokens, stamps, *, layout=None, namespace="", **options):
    """Another pool has saved a prompt."""
    with small_pool(0, 16, layout, device="cpu") as pool, joined_to(pool, where, **options) as storage:
        stamped(pool, tokens, stamps, medium=kvpool.DRAM, namespace=namespace)
        assert storage.save(tokens, namespace).wait(LONG_S).saved == len(stamps)


@pytest.mark.parametrize("medium", [kvpool.HBM, kvpool.DRAM])
@pytest.mark.parametrize("order", ["aggregated", "discrete"])
def test_a_prompt_that_one_pool_saved_another_loads(tmp_path, medium, order):
    tokens = prompt(5)
    with DirectoryStore(tmp_path / "s") as where:
        with small_pool(8, 8, small_layout(order=order)) as pool, joined_to(pool, where) as storage:
            stamped(pool, tokens, [1, 2, 3, 4, 5], medium=medium)
            assert storage.save(tokens).wait(LONG_S) == Saved(saved=5, present=0, gone=0)
            assert storage.save(tokens).wait(LONG_S) == Saved(saved=0, present=5, gone=0)
        with small_pool(0, 8, device="cpu") as pool, joined_to(pool, where) as storage:
            assert storage.load(tokens, budget_s=LONG_S).wait() == Loaded(tokens=20, loaded_tokens=20, late=False)
            assert stamps_of(pool, tokens) == [1, 2, 3, 4, 5]
            stats = storage.stats()
            assert (stats.loads, stats.asked_blocks, stats.loaded_blocks, stats.loaded_bytes) == (1, 5, 5, 5 * 512)
            pool.audit()


def test_every_byte_of_a_block_comes_back(tmp_path):
    layout = small_layout(order="discrete", dims="NHD", pages="fused")
    tokens = prompt(3)
    with DirectoryStore(tmp_path / "s") as where:
        with small_pool(0, 4, layout, device="cpu") as pool, joined_to(pool, where) as storage:
            addrs = store(pool, tokens, medium=kvpool.DRAM)
            view = pool.tensor(kvpool.DRAM).numpy()
            before = np.random.default_rng(1).random((3, *layout.shape)).astype(np.float32)
            view[kvpool.block_ids(addrs)] = before
            storage.save(tokens).wait(LONG_S)
        with small_pool(0, 4, dataclasses.replace(layout, order="aggregated"), device="cpu") as pool:
            with joined_to(pool, where) as storage:
                storage.load(tokens, budget_s=LONG_S).wait()
            with pool.match(tokens) as hit:
                assert (pool.tensor(kvpool.DRAM).numpy()[kvpool.block_ids(hit.addrs)] == before).all()


def test_raw_blocks_are_saved_and_loaded(memory):
    tokens = prompt(3)
    layout = kvpool.RawLayout(block_bytes=64, block_tokens=kit.BLOCK)
    saved_by(memory, tokens, [7, 8, 9], layout=layout)
    with small_pool(0, 4, layout, device="cpu") as pool, joined_to(pool, memory) as storage:
        storage.load(tokens, budget_s=LONG_S).wait()
        assert stamps_of(pool, tokens) == [7, 8, 9]


def test_blocks_that_the_cpu_cannot_read_go_by_way_of_dram(memory):
    """An engine's tensors, as on a GPU: a pool has no view of them."""
    tokens, layout = prompt(3), small_layout(order="discrete")
    tensors = [np.zeros((8, 2, 2, kit.BLOCK, 4), np.float32) for _ in range(layout.layers)]
    with (
        kvpool.Pool(layout, hbm=tensors, dram_blocks=2, huge_pages="never") as pool,
        joined_to(pool, memory) as storage,
    ):
        addrs = store(pool, tokens)
        for number, block in enumerate(kvpool.block_ids(addrs)):
            for tensor in tensors:
                tensor[block] = number + 1
        kept = pool.alloc(1, medium=kvpool.DRAM)
        assert storage.save(tokens).wait(LONG_S).saved == 3  # one block of DRAM is enough
        pool.free(kept)
        assert pool.stats().dram.active == 0
    with small_pool(0, 4, device="cpu") as pool, joined_to(pool, memory) as storage:
        storage.load(tokens, budget_s=LONG_S).wait()
        assert stamps_of(pool, tokens) == [1, 2, 3]


def test_the_pools_part_is_not_loaded(memory):
    tokens = prompt(5)
    saved_by(memory, tokens, [1, 2, 3, 4, 5])
    with small_pool(4, 8) as pool, joined_to(pool, memory) as storage:
        stamped(pool, tokens[:8], [1, 2])
        assert storage.load(tokens, budget_s=LONG_S).wait() == Loaded(tokens=20, loaded_tokens=12, late=False)
        assert stamps_of(pool, tokens) == [1, 2, 3, 4, 5]
        assert ("get", 3) in memory.calls
        memory.calls.clear()
        assert storage.load(tokens).done()  # the store is not asked
        assert storage.load(tokens).wait() == Loaded(tokens=20, loaded_tokens=0, late=False)
        assert memory.calls == []


def test_a_load_ends_at_the_first_block_that_is_missing(memory):
    tokens = prompt(5)
    saved_by(memory, tokens, [1, 2, 3, 4, 5])
    del memory.blocks[list(memory.blocks)[2]]
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 8
        assert stamps_of(pool, tokens) == [1, 2]
        assert pool.stats().dram.active == 0


def test_a_block_that_is_gone_when_it_is_read_ends_the_prefix(tmp_path):
    """It was there when the store was asked."""
    tokens = prompt(4)
    with DirectoryStore(tmp_path / "s") as where:
        saved_by(where, tokens, [1, 2, 3, 4])
        keys = kvpool.storage.ContentKeys(model="m", layout=small_layout()).of_tokens(tokens)
        where._folders.remove(keys[1])
        where._folders.write(keys[1], [b"torn"])
        where.exists = lambda asked, *, timeout=None: [True] * len(asked)
        with small_pool(0, 8, device="cpu") as pool, joined_to(pool, where) as storage:
            assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 4
            assert stamps_of(pool, tokens) == [1]
            assert pool.stats().dram.active == 0


def test_a_load_takes_as_many_blocks_as_there_are(memory):
    tokens = prompt(6)
    saved_by(memory, tokens, [1, 2, 3, 4, 5, 6])
    with small_pool(0, 4, device="cpu") as pool, joined_to(pool, memory) as storage:
        kept = pool.alloc(1, medium=kvpool.DRAM)
        assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 12
        assert stamps_of(pool, tokens) == [1, 2, 3]
        pool.free(kept)


def test_a_load_into_a_pool_without_dram_goes_to_hbm(memory):
    tokens = prompt(2)
    saved_by(memory, tokens, [1, 2])
    with small_pool(4, 0, device="cpu") as pool, joined_to(pool, memory) as storage:
        assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 8
        assert stamps_of(pool, tokens) == [1, 2]


def test_models_that_share_a_memory_each_have_a_storage(memory):
    """Their blocks have different sizes, and lie further apart than they are long."""
    layouts = {"a": small_layout(), "b": small_layout(layers=3)}
    tokens = prompt(3)
    for turn in ("save", "load"):
        with kvpool.Space(hbm="16KiB", dram="32KiB", layouts=[*layouts.values()]) as space:
            for number, (name, layout) in enumerate(layouts.items()):
                pool = space.load(name, layout, allow_waste=True)
                with Storage(pool, memory, model=name, write="never") as storage:
                    stamps = [10 * number + position for position in range(3)]
                    if turn == "save":
                        stamped(pool, tokens, stamps, medium=kvpool.DRAM)
                        assert storage.save(tokens).wait(LONG_S).saved == 3
                    else:
                        assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 12
                        assert stamps_of(pool, tokens) == stamps


@pytest.mark.parametrize(
    "other",
    [{"model": "m2"}, {"rank_slice": "tp 1 of 2"}, {"secret": "t"}, {"namespace": "tenant"}, {"layout": 1}],
    ids=str,
)
def test_what_is_not_the_same_is_not_found(memory, other):
    tokens = prompt(3)
    saved_by(memory, tokens, [1, 2, 3])
    namespace = other.pop("namespace", "")
    layout = small_layout(dims="NHD") if other.pop("layout", None) else small_layout()
    with small_pool(0, 4, layout, device="cpu") as pool, joined_to(pool, memory, **other) as storage:
        assert storage.load(tokens, namespace, budget_s=LONG_S).wait().tokens == 0


def test_namespaces_are_saved_and_loaded_apart(memory):
    tokens = prompt(2)
    saved_by(memory, tokens, [1, 2], namespace="a")
    saved_by(memory, tokens, [3, 4], namespace="b")
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory) as storage:
        for namespace, stamps in (("a", [1, 2]), ("b", [3, 4])):
            storage.load(tokens, namespace, budget_s=LONG_S).wait()
            assert stamps_of(pool, tokens, namespace) == stamps


def test_the_settings_of_the_pool_name_the_model_and_the_secret(memory):
    tokens = prompt(2)
    with small_pool(0, 4, device="cpu", model="m", secret="s") as pool, Storage(pool, memory, write="never") as storage:
        stamped(pool, tokens, [1, 2], medium=kvpool.DRAM)
        storage.save(tokens).wait(LONG_S)
    with small_pool(0, 4, device="cpu") as pool, joined_to(pool, memory, secret="s") as storage:
        assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 8


LAYOUTS = [
    small_layout(),
    *(small_layout(dtype=dtype) for dtype in ("uint8", "int8", "float8_e5m2")),
    kvpool.RawLayout(block_bytes=64, block_tokens=kit.BLOCK),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: getattr(layout, "dtype", "raw"))
def test_blocks_whose_content_is_still_to_come_are_not_saved(memory, layout):
    tokens = prompt(3)
    with small_pool(0, 8, layout, device="cpu") as pool, joined_to(pool, memory) as storage:
        addrs = pool.alloc(3, medium=kvpool.DRAM)
        kit.Stamps(pool).write(addrs[:1], [1])
        pool.insert(tokens[:4], addrs[:1]).close()
        held = pool.insert(tokens, addrs, filled=False)
        assert storage.save(tokens).wait(LONG_S) == Saved(saved=1, present=0, gone=2)
        kit.Stamps(pool).write(addrs[1:], [2, 3])
        pool.filled(held.addrs[1:])
        held.close()
        assert storage.save(tokens).wait(LONG_S) == Saved(saved=2, present=1, gone=0)
        assert pool.stats().dram.active == 0
    with small_pool(0, 8, layout, device="cpu") as pool, joined_to(pool, memory) as storage:
        assert storage.load(tokens, budget_s=LONG_S).wait().tokens == 12
        assert stamps_of(pool, tokens) == [1, 2, 3]


def test_a_save_pins_what_it_names_until_it_ends(memory):
    tokens = prompt(4)
    with small_pool(0, 4, device="cpu") as pool, joined_to(pool, memory) as storage:
        stamped(pool, tokens, [1, 2, 3, 4], medium=kvpool.DRAM)
        memory.writes.clear()
        saving = storage.save(tokens)
        assert memory.put_begun.acquire(timeout=60)
        with pytest.raises(kvpool.OutOfBlocks):
            pool.alloc(1, medium=kvpool.DRAM)
        memory.writes.set()
        assert saving.wait(LONG_S).saved == 4
        pool.free(pool.alloc(4, medium=kvpool.DRAM))


# ---- stores that are slow or gone


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


def test_writers_wait_while_a_load_reads(memory):
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


# ---- handles


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


def test_a_storage_leaves_no_thread_and_no_descriptor(memory):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with small_pool(0, 8, device="cpu") as pool, joined_to(pool, memory, write="always") as storage:
        stamped(pool, prompt(2), [1, 2], medium=kvpool.DRAM)
        storage.save(prompt(2)).wait(LONG_S)
        storage.load(prompt(4), budget_s=LONG_S).wait()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)
