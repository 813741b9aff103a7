"""Workers in other processes as ranks of the scheduler's pool: its peers send to their blocks and fetch from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engines.vllm_apart_kit import ApartEngine
from engines.vllm_kit import BLOCK, LAYOUT, Request, content, prompt

import kvpool
from kvpool import DRAM, ParallelConfig
from kvpool.engines.vllm.layouts import divided
from kvpool.errors import LayoutMismatch

WHOLE = replace(LAYOUT, kv_heads=2 * LAYOUT.kv_heads)  # of both workers


@contextmanager
def peer_of(engine: ApartEngine) -> Iterator[kvpool.Pool]:
    """A pool of one process with whole blocks, which knows the engine's."""
    with kvpool.Pool(WHOLE, 0, 32, name="peer", huge_pages="never") as peer:
        peer.peers.connect(engine.index.pool.peers.listen(f"unix:@kvpool-test-vllm-ranks-{id(engine):x}"))
        yield peer


@pytest.fixture
def engine() -> Iterator[ApartEngine]:
    engine = ApartEngine()
    engine.step({})  # the first plan, with which the workers join
    engine.index.pool.ranks.wait(60)
    yield engine
    engine.close()


def expected(request: Request, blocks: int) -> Any:
    """[block, layer, head, token, 2 * dim] of the first blocks, with what distinguishes layers and workers."""
    kv = np.empty((blocks, *WHOLE.shape), np.float32)
    for at in range(blocks * BLOCK):
        for layer in range(WHOLE.layers):
            for worker in range(2):
                heads = slice(worker * LAYOUT.kv_heads, (worker + 1) * LAYOUT.kv_heads)
                kv[at // BLOCK, layer, heads, at % BLOCK] = content(request, at) + layer + worker / 4
    return kv


def name_of_peer(pool: kvpool.Pool) -> str:
    (known,) = pool.peers
    return known.name


def test_nothing_waits_for_the_workers_to_join():
    engine = ApartEngine()
    assert [rank.joined for rank in engine.index.pool.ranks] == [False, False]
    engine.run(Request("a", prompt(20)))
    assert [rank.joined for rank in engine.index.pool.ranks] == [True, True]
    engine.close()


def test_a_peer_fetches_what_the_workers_have_saved_when_all_have(engine):
    request = Request("a", prompt(20))
    engine.run(request)
    with peer_of(engine) as peer, engine.index.pool.match(prompt(16)) as hit:
        assert hit.tokens == 16
        theirs = name_of_peer(peer)
        with pytest.raises(kvpool.Busy):
            peer.fetch(theirs, hit.addrs, medium=DRAM).wait(60)
        engine.pool.finish_all()
        engine.step({})
        got = peer.fetch(theirs, hit.addrs, medium=DRAM).wait(60)
        assert np.array_equal(peer.tensor(DRAM).numpy()[kvpool.block_ids(got.addrs)], expected(request, 4))


def test_a_worker_loads_what_a_peer_has_sent(engine):
    request = Request("a", prompt(20))
    with peer_of(engine) as peer:
        addrs = peer.alloc(4, medium=DRAM)
        peer.tensor(DRAM).numpy()[kvpool.block_ids(addrs)] = expected(request, 4)
        peer.transfer_with_insert(name_of_peer(peer), prompt(16), addrs, medium=DRAM).wait(60)
    assert engine.run(request) == 16  # it checks the content


def test_blocks_that_could_not_be_saved_can_be_filled_by_a_peer(engine):
    """The worker has refused to load them until then."""
    request = Request("a", prompt(20))
    engine.pool.workers[1].fail_saves = ["later"]
    engine.run(Request("b", prompt(20, seed=1)))
    engine.pool.finish_all()
    assert engine.workers[1].damaged
    engine.step({})
    engine.step({})
    assert not engine.workers[1].damaged
    with peer_of(engine) as peer:
        addrs = peer.alloc(4, medium=DRAM)
        peer.tensor(DRAM).numpy()[kvpool.block_ids(addrs)] = expected(request, 4)
        peer.transfer_with_insert(name_of_peer(peer), prompt(16), addrs, medium=DRAM).wait(60)
    assert engine.run(request) == 16


def test_a_peer_that_sends_what_is_just_being_saved_leaves_no_block_behind(engine, monkeypatch):
    request = Request("a", prompt(16))
    with peer_of(engine) as peer:
        addrs = peer.alloc(4, medium=DRAM)
        peer.tensor(DRAM).numpy()[kvpool.block_ids(addrs)] = expected(request, 4)
        alloc = engine.index.pool.alloc

        def arrives_first(n: int, **how: Any) -> Any:
            mine = alloc(n, **how)
            peer.transfer_with_insert(name_of_peer(peer), prompt(16), addrs, medium=DRAM).wait(60)
            return mine

        monkeypatch.setattr(engine.index.pool, "alloc", arrives_first)
        engine.run(Request("b", prompt(16)))
    engine.pool.finish_all()
    engine.step({})
    assert engine.index.pool.stats().dram.active == 0
    assert engine.run(request) == 12


def test_what_a_peer_reads_is_not_saved_over():
    """A save takes blocks that nobody uses, and a match may hold all."""
    engine = ApartEngine(dram_blocks=4)
    engine.run(Request("a", prompt(16)))
    engine.pool.finish_all()
    engine.step({})
    with engine.index.pool.match(prompt(16)) as hit:
        assert hit.tokens == 16
        engine.run(Request("b", prompt(16, seed=1)))
        assert engine.take_figures()["failed_saves"] == 1
    engine.run(Request("c", prompt(16, seed=1)))
    engine.pool.finish_all()
    engine.step({})
    assert engine.pool.explain_match(prompt(16, seed=1)).matched_tokens == 16
    engine.close()


def test_when_a_worker_is_lost_to_the_pool_all_is_computed(engine, caplog):
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    waiting = engine.start(Request("b", prompt(20)))
    assert engine.planner.match(waiting, 0)[0] == 16
    engine.workers[1]._rank.close()
    with pytest.raises(kvpool.PeerLost):
        while True:
            engine.index.pool.match(prompt(4)).close()
    assert engine.planner.match(waiting, 0) == (0, False)
    engine.finish(waiting)
    assert engine.run(Request("c", prompt(20))) == 0
    assert engine.run(Request("d", prompt(20))) == 0
    assert engine.planner.reset()
    assert len([record for record in caplog.records if "is lost to the cache" in record.message]) == 1
    engine.pool.audit = lambda: None


def test_a_worker_that_cannot_join_is_cached_all_the_same(caplog):
    engine = ApartEngine()
    engine.index._tickets = dict.fromkeys(engine.index._tickets, "no ticket")
    engine.run(Request("a", prompt(20)))
    assert engine.run(Request("b", prompt(20))) == 16
    assert "cannot be reached by other engines" in caplog.text
    engine.close()


# ---- how a block is divided


@pytest.mark.parametrize(("heads", "tp", "own"), [(4, 2, 2), (1, 2, 1), (2, 4, 1), (2, 1, 2)])
def test_the_parts_of_the_workers_make_a_whole_block(heads, tp, own):
    stages = [replace(LAYOUT, layers=layers, kv_heads=own) for layers in (3, 2)]
    whole, parallel = divided([stage for stage in stages for _ in range(tp)], tp, heads)
    assert whole == replace(LAYOUT, layers=5, kv_heads=heads)
    assert parallel == ParallelConfig(tp=tp, pp=2, stage_layers=(3, 2))


def test_parts_that_make_no_whole_block_are_refused():
    for parts, tp, heads in (
        ([LAYOUT, replace(LAYOUT, kv_heads=1)], 2, 4),
        ([LAYOUT, LAYOUT], 2, 2),
        ([LAYOUT, replace(LAYOUT, head_dim=8)], 1, 2),
    ):
        with pytest.raises(LayoutMismatch):
            divided(parts, tp, heads)
