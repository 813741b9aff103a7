"""Engines of several workers that allocate their blocks themselves: the scheduler saves and loads, the ranks copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit import DEVICE
from transfer.ranks_kit import LAYOUT, SETTINGS, Instance, contents, label, left, same

import kvpool
from kvpool import DRAM, HBM, KVLayout, ParallelConfig, RankArena

HBM_BLOCKS, DRAM_BLOCKS = 12, 8
GRIDS = [ParallelConfig(tp=2), ParallelConfig(tp=2, pp=2), ParallelConfig(tp=8)]
PAGES = {
    "HND": (LAYOUT, 1),
    "NHD": (replace(LAYOUT, dims="NHD"), 1),
    "fused": (replace(LAYOUT, pages="fused"), 0),  # vLLM's on a CPU
}

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the workers' tensors are NumPy's")


class Engine:
    """Workers with tensors of their layers and heads, and a scheduler with the free list."""

    def __init__(self, parallel: ParallelConfig, layout: KVLayout = LAYOUT, block_dim: int = 1, **options: Any) -> None:
        self.layout = layout
        self.pool = kvpool.Pool(
            layout, hbm_blocks=HBM_BLOCKS, dram_blocks=DRAM_BLOCKS, parallel=parallel, engine_allocates=True,
            audit=True, **SETTINGS | options,
        )  # fmt: skip
        self.workers: list[tuple[RankArena, list[Any]]] = []
        self.block_dim = block_dim
        self.parts = [part for part in parallel.slices(layout) if part.layout is not None]

    def join(self, parts: int | None = None) -> None:
        for part in self.parts[:parts]:
            assert part.layout is not None
            pages = part.layout.shape[1:]  # of a layer: [k/v, head, token, dim], as the layout orders it
            shape = [*pages[: self.block_dim], HBM_BLOCKS, *pages[self.block_dim :]]
            tensors = [np.zeros(shape, self.layout.numpy_dtype) for _ in range(part.layout.layers)]
            rank = RankArena.join(
                self.pool.ranks.export(part.rank), hbm=tensors, block_dim=self.block_dim, **SETTINGS
            )  # fmt: skip
            self.workers.append((rank, tensors))
        if parts is None:
            self.pool.ranks.wait(60)

    def write(self, blocks: Any, kv: Any) -> None:
        for rank, tensors in self.workers:
            for block, content in zip(blocks, kv, strict=True):
                for tensor, page in zip(tensors, content[rank.slice.index], strict=True):
                    np.moveaxis(tensor, self.block_dim, 0)[block] = page

    def holds(self, blocks: Any, kv: Any) -> bool:
        return all(
            same(np.moveaxis(tensor, self.block_dim, 0)[block], page)
            for rank, tensors in self.workers
            for block, content in zip(blocks, kv, strict=True)
            for tensor, page in zip(tensors, content[rank.slice.index], strict=True)
        )

    def close(self) -> None:
        for rank, _ in self.workers:
            rank.close()
        self.pool.close()


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(*args: Any, **options: Any) -> Engine:
        made.append(Engine(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("parallel", GRIDS, ids=lambda each: label((each, None)))
@pytest.mark.parametrize("wait", [True, False])
def test_a_prompt_survives_the_reuse_of_its_blocks_in_every_worker(
    engines: Any, pages: str, parallel: ParallelConfig, wait: bool
) -> None:
    engine = engines(parallel, *PAGES[pages])
    engine.join()
    pool, prompt = engine.pool, np.arange(12)
    kv = contents(3, engine.layout)
    mine = [5, 2, 7]
    addrs = pool.adopt(mine)
    engine.write(mine, kv)
    saved = pool.save(prompt, addrs, wait=wait)
    assert (saved if wait else saved.wait(60).result) == 3
    pool.free(addrs)
    engine.write(mine, contents(3, engine.layout, seed=1))  # the next request, at once
    theirs = [0, 1, 11]
    again = pool.adopt(theirs)
    with pool.match(prompt) as hit:
        assert hit.tokens == 12
        assert (kvpool.media(hit.addrs) == DRAM).all()
        loaded = pool.load(hit.addrs, again, wait=wait)
        assert (loaded if wait else loaded.wait(60).result) == 3
    assert engine.holds(theirs, kv)
    host = pool.alloc(3, DRAM)
    for addrs, into in ((again, host), (host, again)):
        copied = pool.copy(addrs, into, wait=wait)
        assert (copied if wait else copied.wait(60).result) == 3
        if addrs is again:
            engine.write(theirs, contents(3, engine.layout, seed=2))
    assert engine.holds(theirs, kv)
    pool.free(np.r_[again, host])
    assert pool.audit().dram.historical == 3


def test_the_engines_rule_holds_for_its_blocks_as_in_one_process(engines: Any) -> None:
    engine = engines(GRIDS[0])
    engine.join()
    pool = engine.pool
    addrs = pool.adopt([3, 4])
    with pytest.raises(kvpool.StateError):
        pool.adopt([4])
    with pytest.raises(kvpool.StateError):
        pool.insert(np.arange(8), addrs)
    with pytest.raises(kvpool.StateError):
        pool.alloc(1)
    with pytest.raises(kvpool.StateError):
        pool.swap_out(1)
    with pytest.raises(kvpool.Unsupported, match="ranks"):
        pool.save(np.arange(8), addrs, stream=0)
    pool.free(addrs)
    with pytest.raises(kvpool.StaleAddress):
        pool.save(np.arange(8), addrs)


def test_nothing_is_cached_before_every_worker_has_joined(engines: Any) -> None:
    engine = engines(GRIDS[0])
    pool = engine.pool
    addrs = pool.adopt([3, 4])
    for parts in (0, 1):
        engine.join(parts)
        for wait in (True, False):
            with pytest.raises(kvpool.Busy, match="joined"):
                done = pool.save(np.arange(8), addrs, wait=wait)
                if not wait:
                    done.wait(60)
        assert pool.explain_match(np.arange(8)).matched_tokens == 0
    assert pool.audit().dram.free == DRAM_BLOCKS
    pool.free(addrs)


def test_a_worker_that_is_lost_ends_the_copies(engines: Any) -> None:
    engine = engines(GRIDS[0])
    engine.join()
    pool = engine.pool
    addrs = pool.adopt([3, 4])
    engine.workers[1][0].close()
    with pytest.raises(kvpool.PeerLost):
        pool.save(np.arange(8), addrs)
    assert pool.stats().dram.free == DRAM_BLOCKS


@pytest.mark.parametrize("other", [None, ParallelConfig(tp=4)], ids=["one", "4x1"])
def test_what_prefill_saved_goes_to_decode_of_another_division(engines: Any, other: ParallelConfig | None) -> None:
    engine = engines(GRIDS[0], *PAGES["fused"], name="prefill")
    engine.join()
    pool, prompt = engine.pool, np.arange(12)
    kv = contents(3, engine.layout)
    addrs = pool.adopt([5, 2, 7])
    engine.write([5, 2, 7], kv)
    pool.save(prompt, addrs)
    with closing(Instance("decode", other, layout=engine.layout)) as decode:
        pool.peers.connect(decode.address)
        with pool.match(prompt) as hit:  # the copies in DRAM
            pool.transfer_with_insert("decode", prompt, hit.addrs, medium=HBM).wait(60)
        pool.transfer("decode", addrs, private=b"x").wait(60)  # and the engine's own blocks
        with decode.pool.match(prompt) as hit:
            assert hit.tokens == 12
            assert same(decode.read(hit.addrs), kv)
        with decode.pool.inbox.receive(timeout=60) as item:
            assert same(decode.read(item.addrs), kv)
            decode.pool.free(item.take())
        back = pool.adopt([0, 1, 3])
        with decode.pool.match(prompt) as hit:
            pool.fetch("decode", hit.addrs, to=back).wait(60)  # from decode straight into the engine's blocks
        assert engine.holds([0, 1, 3], kv)
        pool.peers.disconnect("decode")
        assert left(pool, decode.pool) == []
    pool.free(np.r_[addrs, back])


def test_engine_allocates_needs_tensors_or_ranks() -> None:
    with pytest.raises(kvpool.ArgumentError, match="parallel"):
        kvpool.Pool(LAYOUT, hbm_blocks=4, engine_allocates=True)
