"""The default routing policy under load: hits against one ideal cache, and balance, as `bench/run.py routing-load`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from policy.fleet import UnitModel

from kvpool.policy.routing import GlobalScheduler, Request

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench.memserve import routing_load
from bench.memserve.routing_load import Subject, _Asked


@pytest.mark.parametrize("events", [True, False], ids=["events", "dispatch"])
@pytest.mark.parametrize("workload", ["chat", "agents", "documents"])
def test_at_80_per_cent_busy_the_default_has_nearly_the_hits_of_one_cache(workload, events):
    subject = Subject()
    ideal = subject.load(workload, 800, 0.8)["hit_ratio"]
    default, equation_1 = (subject.simulate(policy, events) for policy in ("default", "queue + exec"))
    assert default["hit_ratio"] >= 0.95 * ideal
    assert default["imbalance"] <= 1.3
    assert default["p99_s"] <= 1.01 * equation_1["p99_s"]
    assert equation_1["hit_ratio"] < default["hit_ratio"] - 0.02


@pytest.mark.parametrize("busy", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("workload", ["chat", "agents", "documents"])
def test_the_fleet_is_as_busy_as_it_is_said_to_be(workload, busy):
    """With the hits of one cache: its work over the time in which the requests arrive."""
    subject = Subject()
    loaded = subject.load(workload, 800, busy)
    asked = [
        _Asked(session.start_s, session.name, session.turns[0].prompt, session.turns[0].output)
        for session in subject._sessions
    ]
    hits, work_s, _ = subject._ideal(asked)
    assert (len(asked), hits) == (800, loaded["hit_ratio"])
    assert work_s / (8 * (asked[-1].time_s - asked[0].time_s)) == pytest.approx(busy, rel=0.02)


def test_a_load_that_no_rate_gives_is_refused(monkeypatch):
    monkeypatch.setattr(routing_load, "_ROUNDS", 1)
    with pytest.raises(RuntimeError, match="80% busy"):
        Subject().load("chat", 800, 0.8)


@pytest.mark.parametrize("workload", ["chat", "agents"])
def test_events_tell_something_at_10_per_cent_busy_too(workload):
    """Caches evict what prompts still begin with."""
    subject = Subject()
    assert subject.load(workload, 800, 0.1)["evicted"] > 0
    with_events, without = (subject.simulate("default", events) for events in (True, False))
    assert with_events["hit_ratio"] != without["hit_ratio"]


@pytest.mark.parametrize("busy", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("learn_at", ["dispatch", "response"])
def test_a_prefix_that_all_prompts_begin_with_loads_all_instances_alike(busy, learn_at):
    """Eight instances; ten milliseconds a token, 96 of 100 tokens are the same."""

    class Fast(UnitModel):
        def exec_s(self, tokens, cached=0):
            return super().exec_s(tokens, cached) / 100

        def exec_many_s(self, tokens, cached):
            return super().exec_many_s(tokens, cached) / 100

    now, work_s, free_s = 0.0, Counter(), [0.0] * 8
    scheduler = GlobalScheduler(Fast(), lambda: now, learn_at=learn_at)
    for at in range(8):
        scheduler.add_instance(at)
    under_way = []
    dice = np.random.default_rng(1)
    for number in range(4000):
        arrives = now + dice.exponential(0.04 / (8 * busy))
        for end, ticket in sorted(under_way):
            if end <= arrives:
                now = end
                scheduler.finished(ticket)
        under_way = [each for each in under_way if each[0] > arrives]
        now = arrives
        tokens = np.full(100, 7, np.int32)
        tokens[96:] = number
        decision = scheduler.route(Request(tokens))
        at = decision.instance
        free_s[at] = max(now, free_s[at]) + decision.exec_s
        under_way.append((free_s[at], decision.ticket))
        work_s[at] += decision.exec_s
    assert max(work_s.values()) <= 1.3 * sum(work_s.values()) / 8, work_s
