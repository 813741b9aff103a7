"""Ranks that are pools: what no scheduler holds together is refused before anything moves."""

from __future__ import annotations

import dataclasses

import pytest
from control.migration_kit import LENGTH, Place, Reader, check, prompt_of
from kit import small_layout, small_pool
from transfer.ranks_kit import SETTINGS

import kvpool
from kvpool.control.migration import Migrations


@pytest.fixture
def places():
    reader = Reader()
    found = [Place("a", reader, settings=SETTINGS), Place("b", reader, settings=SETTINGS)]
    found[0].pool.peers.connect(found[1].address)
    yield (*found, reader)
    for each in found:
        each.close()


@pytest.fixture
def scheduler():
    with kvpool.Pool(
        small_layout(kv_heads=4), 64, 0, parallel=kvpool.ParallelConfig(tp=2), name="s", **SETTINGS
    ) as pool:
        yield pool


def test_a_request_whose_blocks_lie_in_several_pools_is_refused_and_goes_on(places):
    a, b, reader = places
    a.engine.begin("r", prompt_of(1), LENGTH)
    progress = a.engine.progress
    a.engine.progress = lambda request: dataclasses.replace(progress(request), pools=2)
    with pytest.raises(kvpool.Unsupported, match=r"in 2 pools.*Pool\.ranks"):
        a.migrations.migrate("r", "b")
    assert a.migrations.under_way() == b.migrations.arriving() == ()
    check(reader, a.engine, "r", prompt_of(1))
    for each in (a, b):
        each.check_empty()


def test_a_pool_that_is_the_memory_of_a_rank_migrates_nothing(places, scheduler):
    a, _, reader = places
    a.engine.begin("r", prompt_of(1), LENGTH)
    with kvpool.RankArena.join(scheduler.ranks.export(0), memory=a.pool):
        with pytest.raises(kvpool.StateError, match="the memory of a rank"):
            a.migrations.migrate("r", "b")
        assert a.migrations.under_way() == ()
    check(reader, a.engine, "r", prompt_of(1))


def test_a_pool_that_is_the_memory_of_a_rank_gets_no_migrations(scheduler):
    with small_pool(64, 0, name="worker", **SETTINGS) as pool:
        pool.peers.listen("unix:@kvpool-migration-worker")
        with kvpool.RankArena.join(scheduler.ranks.export(0), memory=pool):
            with pytest.raises(kvpool.StateError, match="the memory of a rank"):
                Migrations(pool, None)
            assert pool.stats().hbm.active == 0
