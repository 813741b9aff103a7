"""Live migration of requests of several ranks, between instances that share their model out differently."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from control.migration_kit import BLOCK, Reader, ToyEngine, eventually, prompt_of, reference
from transfer.ranks_kit import instances_of

import kvpool
from kvpool.control.migration import Migrations

LENGTH = 40
TP2, GRID = kvpool.ParallelConfig(tp=2), kvpool.ParallelConfig(tp=2, pp=2)


class RankEngine(ToyEngine):
    """Its scheduler writes and reads the cells of all ranks."""

    def __init__(self, instance, reader):
        self.instance = instance
        super().__init__(instance.pool, reader, instance.name)

    def _write(self, blocks, first, tokens):
        for at in range(first, len(tokens)):
            addrs = [blocks[at // BLOCK]]
            kv = self.instance.read(addrs)
            kv.view(np.uint16)[..., at % BLOCK, :] = cell(tokens[at], at)
            self.instance.write(addrs, kv)

    def _read(self, blocks, n):
        kv = self.instance.read(blocks).view(np.uint16)
        for at in range(n):
            found = kv[at // BLOCK, ..., at % BLOCK, :]
            assert (found == found.flat[0]).all(), f"token {at} is half written"
            yield found.flat[0]


def cell(token, at):
    """Fits into the 16 bits of an element."""
    return (token * 61 + at) % (1 << 16)


@pytest.fixture(autouse=True)
def _cells_of_ranks(monkeypatch):
    monkeypatch.setattr("control.migration_kit.content", lambda pool, medium: None)  # it lies in ranks
    monkeypatch.setattr("control.migration_kit.cell", cell)


def migrate(make, pair, by):
    reader, prompt = Reader(), prompt_of(1)
    a, b = (make(name, parallel, blocks=16) for name, parallel in zip("ab", pair, strict=True))
    a.pool.peers.connect(b.address)
    here, there = (RankEngine(one, reader) for one in (a, b))
    with Migrations(a.pool, here) as leaving, Migrations(b.pool, there) as coming:
        here.begin("r", prompt, LENGTH)
        for _ in range(6):
            here.step("r")
        result = leaving.migrate("r", "b", by=by).wait()
        assert result.blocks_sent == (4 if by == "kv" else 0)
        assert there.finish("r") == reference(prompt, LENGTH)
        eventually(lambda: not coming.arriving())
        for one in (a, b):
            stats = one.pool.audit().hbm
            assert (stats.active, stats.reserved, stats.pinned) == (0, 0, 1)


@pytest.mark.parametrize("pair", [(TP2, GRID), (None, TP2), (GRID, None)], ids=["tp2-grid", "one-tp2", "grid-one"])
@pytest.mark.parametrize("by", ["kv", "tokens"])
def test_a_request_of_several_ranks_migrates(pair, by):
    with instances_of() as make:
        migrate(make, pair, by)


@pytest.fixture(autouse=True)
def _no_record_of_loss(monkeypatch):
    """Pytest keeps what is logged, and that has the error, with the frames of an inbox that are to go."""
    monkeypatch.setattr(logging.getLogger("kvpool.received"), "disabled", True)


def lose(make, pair, at, lost):
    """A migration from a to b, whose fetch for `at` finds that a rank is lost, and its instance with it."""
    reader, prompt = Reader(), prompt_of(1)
    a, b = (make(name, parallel, blocks=16) for name, parallel in zip("ab", pair, strict=True))
    a.pool.peers.connect(b.address)
    here, there = (RankEngine(one, reader) for one in (a, b))
    fetch = b.pool.fetch

    def fetches(*args, priority, **named):
        if priority == at:
            (a if lost == "a" else b).ranks[0].close()
            eventually(lambda: not (b if lost == "a" else a).pool.peers.list())
        return fetch(*args, priority=priority, **named)

    b.pool.fetch = fetches
    with Migrations(a.pool, here) as leaving, Migrations(b.pool, there) as coming:
        here.begin("r", prompt, LENGTH)
        moving = leaving.migrate("r", "b", by="kv", timeout=5)
        with pytest.raises(kvpool.PeerLost if lost == "a" else kvpool.DeadlineExceeded):
            moving.wait(60)
        if lost == "a":
            eventually(lambda: "r" in there.requests)
            assert there.prefilled
            assert coming.arriving() == ("r",)  # nothing proves that its source has ended
        assert moving.state == ("handed over" if lost == "a" else "here")
        assert (there if lost == "a" else here).finish("r") == reference(prompt, LENGTH)
        leaving.close(0.1)  # nobody is heard any more
    del b.pool.fetch


@pytest.mark.parametrize("pair", [(TP2, GRID), (GRID, None)], ids=["tp2-grid", "grid-one"])
def test_a_request_arrives_though_a_rank_of_its_source_is_lost_after_the_hand_over(pair):
    """And its source with it: what is missing is computed."""
    with instances_of() as make:
        lose(make, pair, "decode", "a")


@pytest.mark.parametrize("pair", [(TP2, GRID), (None, TP2)], ids=["tp2-grid", "one-tp2"])
def test_a_request_stays_when_a_rank_of_its_destination_is_lost_before_the_hand_over(pair):
    with instances_of() as make:
        lose(make, pair, "background", "b")
