"""Pools whose engine allocates: it may use a block again at any moment, so none is ever cached.

The recipes of docs/how-to/engine-integration.md, with the cache in the engine's pool and in another one, run here
against an engine that takes what it gave back at once, and fills it with something else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kit import BLOCK, cached_tokens, prompt, refused, small_layout
from test_docs import ROOT, fences
from transfer.kit import Child, address_of, eventually, route_or_skip

import kvpool
from kvpool import DRAM, HBM, MIXED, Pool

BLOCKS = 6
LAYOUT = small_layout()
GUIDE = ROOT / "docs" / "how-to" / "engine-integration.md"


def tensors_of(blocks: int = BLOCKS) -> list[np.ndarray]:
    """[block, k/v, head, token, dim], a tensor a layer."""
    return [np.zeros((blocks, 2, 2, BLOCK, 4), np.float32) for _ in range(2)]


@pytest.fixture
def engine_pool() -> Iterator[Pool]:
    options: dict[str, Any] = {"huge_pages": "never", "audit": True}
    with Pool(LAYOUT, hbm=tensors_of(), dram_blocks=6, engine_allocates=True, **options) as pool:
        yield pool


# ---- the states


def test_the_pool_mirrors_the_blocks_that_the_engine_takes_and_gives_back(engine_pool):
    addrs = engine_pool.adopt([4, 2, 5])
    assert kvpool.block_ids(addrs).tolist() == [4, 2, 5]
    assert engine_pool.stats().hbm.active == 3
    engine_pool.free(addrs[:1])
    again = engine_pool.adopt(np.array([4]))
    assert again[0] != addrs[0]
    with refused(engine_pool, kvpool.StaleAddress):
        engine_pool.free(addrs[:1])


def test_the_engine_cannot_take_a_block_twice(engine_pool):
    engine_pool.adopt([1])
    with refused(engine_pool, kvpool.StateError, "active", block=1, position=1):
        engine_pool.adopt([2, 1])
    with refused(engine_pool, kvpool.StateError, "active", block=3, position=2):
        engine_pool.adopt([3, 2, 3])
    with refused(engine_pool, kvpool.ArgumentError, "6 blocks", block=6, position=1):
        engine_pool.adopt([2, 6])
    for wrong in ([-1], [2**24], [2**64]):
        with refused(engine_pool, kvpool.ArgumentError, wrong[0]):
            engine_pool.adopt(wrong)
    with refused(engine_pool, kvpool.ArgumentTypeError):
        engine_pool.adopt([1.5])


def test_the_pool_never_allocates_the_engines_blocks(engine_pool):
    for call in (lambda: engine_pool.alloc(1), lambda: engine_pool.alloc(7), lambda: engine_pool.alloc(1, evict=False)):
        with refused(engine_pool, kvpool.StateError, "adopt"):
            call()
    assert kvpool.media(engine_pool.alloc(4, medium=MIXED)).tolist() == [DRAM] * 4
    with refused(engine_pool, kvpool.OutOfBlocks, requested=3):
        engine_pool.alloc(3, medium=MIXED)


def test_adopt_is_for_engines_that_allocate():
    with Pool(LAYOUT, hbm=tensors_of(), huge_pages="never") as pool, refused(pool, kvpool.StateError, "alloc"):
        pool.adopt([1])


# ---- what is never served


def test_the_engines_blocks_are_never_cached(engine_pool):
    addrs = engine_pool.adopt([3, 1])
    with refused(engine_pool, kvpool.StateError, "the engine's", block=3, position=0):
        engine_pool.insert(prompt(2), addrs)
    own = engine_pool.alloc(1, medium=DRAM)
    with refused(engine_pool, kvpool.StateError, "the engine's", block=1, position=1):
        engine_pool.insert(prompt(2), [own[0], addrs[1]])
    with refused(engine_pool, kvpool.StateError, "the engine's"):
        engine_pool.batch.insert([(prompt(1, 1), own), (prompt(2), addrs)])
    assert cached_tokens(engine_pool, prompt(2)) == cached_tokens(engine_pool, prompt(1, 1)) == 0


def test_the_engines_block_is_refused_as_a_duplicate_too(engine_pool):
    engine_pool.insert(prompt(1), engine_pool.alloc(1, medium=DRAM)).close()
    mine = engine_pool.adopt([2])
    for free_duplicates in (False, True):
        with refused(engine_pool, kvpool.StateError, "the engine's"):
            engine_pool.insert(prompt(1), mine, free_duplicates=free_duplicates)


def test_nothing_cached_moves_into_or_out_of_the_engines_blocks(engine_pool):
    engine_pool.insert(prompt(2), engine_pool.alloc(2, medium=DRAM)).close()
    into = engine_pool.adopt([0, 1])
    with engine_pool.match(prompt(2)) as hit:
        for options in ({"into": into}, {}, {"into": into, "wait": False}):
            with refused(engine_pool, kvpool.StateError, "the engine"):
                engine_pool.swap_in(hit.addrs, **options)
    for options in ({}, {"wait": False}):
        with refused(engine_pool, kvpool.StateError, "the engine"):
            engine_pool.swap_out(2, **options)
    assert engine_pool.evict(2, medium=HBM) == 0


def test_peers_never_borrow_blocks_that_the_engine_may_take(engine_pool):
    with Pool(LAYOUT, dram_blocks=6, name="peer", huge_pages="never") as peer:
        name = peer.peers.connect(engine_pool.peers.listen(address_of("loopback")))
        blocks = peer.alloc(2, medium=DRAM)
        with refused(engine_pool, kvpool.StateError, "the engine allocates"):
            peer.alloc(2, instance=name)
        with refused(engine_pool, kvpool.StateError, "the engine allocates"):
            peer.transfer(name, blocks).wait()
        held = engine_pool.adopt([0, 1])
        with refused(engine_pool, kvpool.NotOwner):
            peer.transfer(name, blocks, to=held).wait()


def test_an_address_that_the_engine_gave_back_is_neither_sent_nor_read():
    memory = tensors_of()
    with (
        Pool(LAYOUT, hbm=memory, engine_allocates=True, name="engine", huge_pages="never") as engine,
        Pool(LAYOUT, dram_blocks=6, name="store", huge_pages="never") as store,
    ):
        engine.peers.connect(store.peers.listen(address_of("loopback")))
        before = engine.adopt([2])
        engine.free(before)
        for name in ("given back", "taken again"):
            if name == "taken again":
                engine.adopt([2])
            with pytest.raises(kvpool.StaleAddress):
                store.fetch("engine", before, medium=DRAM).wait()
            with refused(engine, kvpool.StaleAddress):
                engine.transfer("store", before, medium=DRAM).wait()
            with refused(engine, kvpool.StaleAddress):
                engine.insert(prompt(1), before)
            assert store.stats().dram.free == 6


@pytest.mark.parametrize("routes", [("sock",), ("cma",)], ids=["placed here", "written by the owner"])
def test_blocks_of_a_failed_fetch_stay_the_engines_until_it_frees_them(routes):
    route_or_skip(routes[0])
    with contextlib.closing(Child()) as child:
        code = "pool = small_pool(name='owner', lease_s=60, routes=routes)\npool.peers.listen(where)"
        where = child(code, where=address_of("sock-unix"), routes=routes)
        source = child("store(pool, prompt(2)).tolist()")
        options: dict[str, Any] = {"huge_pages": "never", "audit": True, "routes": routes, "lease_s": 60}
        with Pool(LAYOUT, hbm=tensors_of(), engine_allocates=True, **options) as engine:
            engine.peers.connect(where)
            addrs = engine.adopt([1, 3])
            child.kill(signal.SIGSTOP)
            with pytest.raises(kvpool.DeadlineExceeded):
                engine.fetch("owner", source, to=addrs, timeout=0.2).wait()
            if routes == ("cma",):
                with refused(engine, kvpool.StateError, "quarantined"):
                    engine.free(addrs)
                child.kill()  # now it writes no more
                eventually(lambda: engine.stats().hbm.active == 2)
            engine.free(addrs)
            assert engine.stats().hbm.free == BLOCKS
            child.kill()  # a process that is stopped would not end by itself


# ---- the recipe


class ReusingEngine:
    """An engine with its own free list: it takes first the block that it freed last, and fills it at once."""

    def __init__(self, layers: list[np.ndarray]) -> None:
        self.layers = layers
        self.free = list(range(layers[0].shape[1]))  # [k/v, block, ...]

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self.free += blocks
        for layer in self.layers:  # the next request's content, before anybody says a word to the pool
            layer[:, blocks] = -1.0

    def fill(self, blocks: list[int], values: list[float]) -> None:
        for block, value in zip(blocks, values, strict=True):
            for layer in self.layers:
                layer[:, block] = value

    def holds(self, blocks: Any, values: list[float]) -> bool:
        return all((layer[:, block] == value).all() for block, value in zip(blocks, values, strict=True)
                   for layer in self.layers)  # fmt: skip


@dataclass
class Recipe:
    """How an engine saves blocks to the pool that caches, and loads them."""

    engine: Pool
    store: Pool  # that caches
    layers: list[np.ndarray]
    save: Callable[[Any, Any], Any]
    copy_to_engine: Callable[[Any, Any], Any]

    def load(self, tokens: Any, addrs: Any) -> int:
        """Fills blocks that the engine holds; how many."""
        with self.store.match(tokens) as hit:
            filled = min(len(hit.addrs), len(addrs))
            if filled:
                self.copy_to_engine(hit.addrs[:filled], addrs[:filled])
        return filled


def in_one_pool() -> Recipe:
    """As the guide has it, in the pool that its code leaves behind."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for fence in fences(GUIDE.read_text()):
        if fence.info == "python":
            exec(compile(fence.text, GUIDE.name, "exec"), namespace)
    engine = namespace["engine"]
    return Recipe(engine, engine, namespace["layers"], engine.save, lambda cached, into: engine.load(cached, into))


def in_two_pools() -> Recipe:
    """The store may be in another process; here it is not."""
    layers = [np.zeros((2, 32, BLOCK, 2, 4), np.float32) for _ in range(2)]
    layout = dataclasses.replace(LAYOUT, dims="NHD")
    engine = Pool(layout, hbm=layers, block_dim=1, engine_allocates=True, name="engine")
    store = Pool(layout, dram_blocks=64, name="store")
    engine.peers.connect(store.peers.listen(address_of("loopback")))

    def save(tokens: Any, addrs: Any) -> None:
        copies = store.fetch("engine", addrs, medium=DRAM).wait().addrs
        try:
            store.insert(tokens, copies, free_duplicates=True).close()
        except kvpool.Error:
            store.free(copies)
            raise

    return Recipe(engine, store, layers, save, lambda cached, into: engine.fetch("store", cached, to=into).wait())


@pytest.fixture(params=[in_one_pool, in_two_pools])
def recipe(request: pytest.FixtureRequest, clean_environment: None) -> Iterator[Recipe]:
    """Both of them."""
    one = request.param()
    yield one
    one.engine.close()
    one.store.close()


def test_the_documented_recipe_serves_no_wrong_byte_if_an_engine_reuses_blocks_at_once(recipe):
    engine, store, save, load = recipe.engine, recipe.store, recipe.save, recipe.load
    reusing = ReusingEngine(recipe.layers)
    assert engine.stats().hbm.active == 0  # the guide has given all back
    dice = random.Random(7)
    cached: dict[int, int] = {}  # blocks of each prompt that were saved
    hits = 0
    for step in range(120):
        name = dice.randrange(6)
        values = [100.0 * name + block for block in range(5)]
        count = dice.randint(1, 5)
        tokens = prompt(count, name + 1000)
        blocks = reusing.take(count)
        addrs = engine.adopt(blocks)
        filled = load(tokens, addrs)
        assert filled == min(count, cached.get(name, 0)), step
        assert reusing.holds(blocks[:filled], values[:filled]), step
        hits += filled
        reusing.fill(blocks[filled:], values[filled:count])
        if dice.random() < 0.7:
            save(tokens, addrs)
            cached[name] = max(count, cached.get(name, 0))
        engine.free(addrs)
        reusing.give_back(blocks)
    assert hits > 50
    engine.audit()
    store.audit()
    assert engine.stats().hbm.free == len(reusing.free)


def test_the_recipe_leaves_nothing_behind_when_it_fails(recipe):
    engine, store, save, load = recipe.engine, recipe.store, recipe.save, recipe.load
    held = engine.adopt([4, 6])
    with pytest.raises(kvpool.ArgumentError):
        save(prompt(1, 4321), held)  # two blocks for the tokens of one
    assert store.stats().dram.active == 0
    save(prompt(2, 4321), held)
    assert load(prompt(2, 4321), held[:1]) == 1  # more is cached than there is room for
    if store is not engine:
        store.close()
        with pytest.raises(kvpool.Error):
            load(prompt(2, 4321), held)
    eventually(lambda: engine.stats().hbm.active == 2)
    engine.free(held)
    assert engine.stats().hbm.active == 0


def test_saving_blocks_that_the_engine_gave_back_too_early_stores_nothing(recipe):
    engine, store, save = recipe.engine, recipe.store, recipe.save
    addrs = engine.adopt([5])
    engine.free(addrs)
    tokens = prompt(1, 4321)
    with pytest.raises(kvpool.StaleAddress):
        save(tokens, addrs)
    assert cached_tokens(store, tokens) == store.stats().dram.active == 0
