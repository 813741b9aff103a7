"""Copies that a rank makes by itself, of blocks that its scheduler names by their numbers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from kit import DEVICE, prompt
from transfer.ranks_kit import LAYOUT, SETTINGS, Instance, contents, instances_of, left, same

import kvpool
from kvpool import DRAM, HBM, ParallelConfig, RankArena, block_ids

BLOCKS = 12  # of HBM
TP2 = ParallelConfig(tp=2)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the workers' tensors are NumPy's")


class Engine:
    """A scheduler whose pool knows which prompt is in which block, and workers that copy when they are told to."""

    def __init__(self, name: str = "apart", parallel: ParallelConfig = TP2, **settings: Any) -> None:
        self.pool = kvpool.Pool(
            LAYOUT, hbm_blocks=BLOCKS, dram_blocks=8, parallel=parallel, engine_allocates=True, audit=True, name=name,
            **SETTINGS,
        )  # fmt: skip
        self.workers: list[tuple[RankArena, list[Any]]] = []
        for part in parallel.slices(LAYOUT):
            assert part.layout is not None
            tensors = [np.zeros((BLOCKS, *part.layout.shape[1:]), np.float16) for _ in range(part.layout.layers)]
            rank = RankArena.join(self.pool.ranks.export(part.rank), hbm=tensors, **SETTINGS | settings)
            self.workers.append((rank, tensors))
        self.pool.ranks.wait(60)

    def write(self, blocks: list[int], kv: Any) -> None:
        for rank, tensors in self.workers:
            for block, content in zip(blocks, kv, strict=True):
                for tensor, page in zip(tensors, content[rank.slice.index], strict=True):
                    tensor[block] = page

    def read(self, blocks: list[int]) -> Any:
        kv = np.zeros((len(blocks), *LAYOUT.shape), np.float16)
        for rank, tensors in self.workers:
            for i, block in enumerate(blocks):
                kv[i][rank.slice.index] = [tensor[block] for tensor in tensors]
        return kv

    def save(self, tokens: Any, blocks: list[int]) -> Any:
        """As a scheduler that plans a save, and hears of its end."""
        addrs = self.pool.alloc(len(blocks), medium=DRAM)
        self.pool.insert(tokens, addrs, filled=False).close()
        for rank, _ in self.workers:
            rank.copy(blocks, block_ids(addrs), DRAM)
        return addrs

    def close(self) -> None:
        for rank, _ in self.workers:
            rank.close()
        self.pool.close()


@pytest.mark.parametrize("wait", [True, False])
def test_what_every_rank_has_saved_is_loaded_into_other_blocks(wait: bool) -> None:
    with closing(Engine()) as engine:
        kv = contents(3, LAYOUT)
        engine.write([5, 2, 7], kv)
        addrs = engine.save(prompt(3), [5, 2, 7])
        engine.pool.filled(addrs)
        engine.write([5, 2, 7], contents(3, LAYOUT, seed=1))
        with engine.pool.match(prompt(3)) as hit:
            for rank, _ in engine.workers:
                copied = rank.copy(block_ids(hit.addrs), [0, 1, 11], HBM, wait=wait)
                assert (copied if isinstance(copied, int) else copied.wait(60).result) == 3
        assert same(engine.read([0, 1, 11]), kv)


def test_what_the_ranks_have_saved_goes_to_an_instance_of_another_division() -> None:
    """Peers find a prompt when its content is there, and what they send is found by the ranks."""
    with closing(Engine()) as engine, closing(Instance("other", ParallelConfig(tp=4))) as other:
        engine.pool.peers.connect(other.address)
        kv = contents(3, LAYOUT)
        engine.write([5, 2, 7], kv)
        addrs = engine.save(prompt(3), [5, 2, 7])
        with pytest.raises(kvpool.Busy, match="to come"):
            engine.pool.transfer_with_insert("other", prompt(3), addrs).wait(60)
        engine.pool.filled(addrs)
        engine.pool.transfer_with_insert("other", prompt(3), addrs, medium=DRAM).wait(60)
        with other.pool.match(prompt(3)) as hit:
            assert same(other.read(hit.addrs), kv)
        theirs, sent = other.filled(2, seed=4)
        other.pool.transfer_with_insert("apart", prompt(2, 1), theirs, medium=DRAM).wait(60)
        with engine.pool.match(prompt(2, 1)) as hit:
            for rank, _ in engine.workers:
                rank.copy(block_ids(hit.addrs), [3, 4], HBM)
        assert same(engine.read([3, 4]), sent)
        engine.pool.peers.disconnect("other")
        other.pool.free(theirs)
        assert left(engine.pool, other.pool) == []


def test_wrong_numbers_and_media_are_refused() -> None:
    with closing(Engine()) as engine:
        rank = engine.workers[0][0]
        for source, target, medium in (
            ([12], [0], DRAM),
            ([0], [8], DRAM),
            ([-1], [0], DRAM),
            ([0], [2**64 - 1], DRAM),
            ([0, 1], [0], DRAM),
            ([0, 1], [3, 3], DRAM),
            ([0], [0], kvpool.MIXED),
            ([0], [0], kvpool.DISK),
        ):
            with pytest.raises(kvpool.ArgumentError):
                rank.copy(source, target, medium)
        for source, medium in ((None, DRAM), ([1.0], DRAM), ([[1]], DRAM), (3, DRAM), (["a"], DRAM), ([0], "hbm")):
            with pytest.raises(kvpool.ArgumentTypeError):
                rank.copy(source, [0], medium)  # type: ignore[arg-type]
        assert rank.copy([], [], HBM) == 0
        assert rank.copy(np.array([3], np.uint8), np.array([7]), DRAM) == 1


def test_a_rank_that_is_lost_copies_no_more() -> None:
    with closing(Engine()) as engine:
        rank = engine.workers[0][0]
        engine.pool.close()
        assert rank.wait_lost(60)
        with pytest.raises(kvpool.PeerLost):
            rank.copy([0], [0], DRAM)
        rank.close()
        with pytest.raises(kvpool.Error):
            rank.copy([0], [0], DRAM)


def test_a_rank_without_one_of_the_media_has_nothing_to_copy() -> None:
    with instances_of() as make:
        instance = make("no-dram", ParallelConfig(tp=2), dram=0)
        with pytest.raises(kvpool.StateError, match="no DRAM"):
            instance.ranks[0].copy([], [], HBM)


def test_a_rank_takes_the_memory_of_a_pool_that_was_there_before() -> None:
    part = TP2.slices(LAYOUT)[0].layout
    assert part is not None
    tensors = [np.zeros((BLOCKS, *part.shape[1:]), np.float16) for _ in range(part.layers)]
    with (
        kvpool.Pool(part, hbm=tensors, dram_blocks=4, engine_allocates=True, **SETTINGS) as memory,
        kvpool.Pool(LAYOUT, hbm_blocks=BLOCKS, dram_blocks=4, parallel=TP2, **SETTINGS) as pool,
    ):
        ticket = pool.ranks.export(0)
        held = memory.adopt([3])
        for wrong in ({"hbm": tensors}, {"block_dim": 1}, {"device": "cuda"}, {"secret": "x"}):
            with pytest.raises(kvpool.ArgumentError):
                RankArena.join(ticket, memory=memory, **wrong)
        with pytest.raises(kvpool.ArgumentTypeError):
            RankArena.join(ticket, memory=tensors)  # type: ignore[arg-type]
        with pytest.raises(kvpool.LayoutMismatch):
            RankArena.join(ticket, memory=pool)
        with kvpool.Pool(part, BLOCKS, 3, **SETTINGS) as small, pytest.raises(kvpool.LayoutMismatch):
            RankArena.join(ticket, memory=small)
        with RankArena.join(ticket, memory=memory) as rank:
            assert pool.ranks.list()[0].joined
            with pytest.raises(kvpool.StateError, match="given"):
                rank.copy([3], [0], DRAM)
            into = memory.alloc(1, medium=DRAM)
            assert memory.copy(held, into) == 1
        assert not memory.closed
        memory.free(np.r_[held, into])


@pytest.mark.parametrize("pieces", ["whole", "layer"])
def test_a_rank_does_not_take_the_memory_of_a_model_of_a_space(pieces: Any) -> None:
    layout = kvpool.KVLayout(2, 4, 64, "float16", 16)
    part = TP2.slices(layout)[0].layout
    assert part is not None
    unit = 4 << 10  # half a layer of the rank's part of a block
    with (
        kvpool.Space((BLOCKS + 3) * unit, (4 + 3) * unit, unit=unit, huge_pages="never") as space,
        kvpool.Pool(layout, hbm_blocks=BLOCKS, dram_blocks=4, parallel=TP2, **SETTINGS) as pool,
    ):
        memory = space.load("a", part, pieces=pieces, secret="ranks")
        # It has as many numbers as the scheduler has blocks, but its blocks would overlap if they had all of them.
        with pytest.raises(kvpool.Unsupported, match=r"space|pieces"):
            RankArena.join(pool.ranks.export(0), memory=memory)
        assert not pool.ranks.list()[0].joined


def test_a_join_does_not_touch_the_engines_tensors() -> None:
    with closing(kvpool.Pool(LAYOUT, hbm_blocks=BLOCKS, dram_blocks=2, parallel=TP2, **SETTINGS)) as pool:
        part = TP2.slices(LAYOUT)[0]
        assert part.layout is not None
        tensors = [np.ones((BLOCKS, *part.layout.shape[1:]), np.float16) for _ in range(part.layout.layers)]
        with RankArena.join(pool.ranks.export(0), hbm=tensors, zero_on_alloc=True, **SETTINGS):
            assert all((tensor == 1).all() for tensor in tensors)
