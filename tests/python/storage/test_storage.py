"""A pool with a store: save and load."""

from __future__ import annotations

import dataclasses

import kit
import numpy as np
import pytest
from kit import prompt, small_layout, small_pool, store
from storage_kit import LONG_S, MemoryStore, joined_to, saved_by, stamped, stamps_of

import kvpool
from kvpool.storage import DirectoryStore, Loaded, Saved, Storage


@pytest.fixture
def memory():
    return MemoryStore()


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
