"""An instance of several ranks that has lost one: it has no memory any more, and no plan is to count on it.

Bugs these tests are there to find: requests that are sent, epoch by epoch, to an instance that no peer can reach.
"""

from __future__ import annotations

import logging

import pytest
from control.migration_kit import Reader, eventually
from control.rebalancing_kit import World
from control.test_migration_ranks import RankEngine
from transfer.ranks_kit import instances_of

import kvpool
from kvpool.control.migration import Migrations
from kvpool.control.rebalancing import Rebalancer


def test_an_instance_that_has_lost_a_rank_takes_no_part_after_a_while_and_says_why_quietly(caplog):
    caplog.set_level(logging.INFO, "kvpool.rebalancing")
    world = World()
    (one,) = world.add_all({"a": 30})
    with Rebalancer(one.migrations, one.engine, one.cluster, capacity=96, epoch_s=0.02) as rebalancer:
        eventually(lambda: rebalancer.plans)
        one.migrations.lost = kvpool.PeerLost("ranks [1] of this instance are lost")
        eventually(lambda: one.record == {})
        assert not rebalancer.plans
    said = [each for each in caplog.records if "takes no part" in each.getMessage()]
    assert said
    assert all(each.levelno == logging.INFO for each in said)


def test_another_instance_gets_the_requests_meanwhile():
    world = World("bf", instances_min=3)  # that are idle do not end
    one, two, three = world.add_all({}, {}, {"c": 30})
    world.rounds(3)
    two.migrations.lost = kvpool.PeerLost("ranks [0] of this instance are lost")
    for _ in range(12):
        for each in (one, three):
            each.step()
        with pytest.raises(kvpool.PeerLost):
            two.step()
        two.epochs.failed()
        world.now += 0.5
    assert two.record == {}
    one.engine.queue = {"n": 80, "m": 80}
    world.rounds(4, but=(2,))
    assert [to for _, to in one.engine.placed] == ["i1"]
    assert world.started  # the other one needs a new instance


@pytest.fixture
def _quiet(monkeypatch):
    """What is logged keeps the frames of an inbox that are to go."""
    monkeypatch.setattr(logging.getLogger("kvpool.received"), "disabled", True)
    monkeypatch.setattr("control.migration_kit.content", lambda pool, medium: None)


@pytest.mark.usefixtures("_quiet")
def test_a_scheduler_that_has_lost_a_rank_says_so_before_anything_else():
    with instances_of() as make:
        ask_the_scheduler(make)


def ask_the_scheduler(make):
    a, b = (make(name, kvpool.ParallelConfig(tp=2), blocks=16) for name in "ab")
    a.pool.peers.connect(b.address)
    with Migrations(a.pool, RankEngine(a, Reader())) as leaving:
        leaving.check()
        a.ranks[1].close()
        eventually(lambda: not a.pool.peers.list())
        for ask in (leaving.check, lambda: leaving.migrate("r", "b")):
            with pytest.raises(kvpool.PeerLost, match=r"ranks \[1\] of this instance"):
                ask()
