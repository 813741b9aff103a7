"""Models with windows in a cluster: what one engine has is fetched by another one, of windows their tail alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engines.test_vllm_groups import KINDS
from engines.vllm_group_members_kit import MemberGroups, WorkersGroups, two
from engines.vllm_kit import Request, prompt

import kvpool
from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.pulled import TailFetch

FROM = {"kvpool": {"pull": "prefill-0"}}
ENGINES = {"one worker": MemberGroups, "two workers": WorkersGroups}


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def kind(request):
    return request.param


@pytest.mark.parametrize("windowed", KINDS, ids=str)
def test_what_another_engine_has_is_fetched_of_windowed_groups_the_window_alone(url, kind, windowed):
    with two(url, kind, windowed=windowed) as (owner, engine):
        owner.decode(Request("a", prompt(30)))
        assert engine.decode(Request("b", prompt(50), kv_transfer_params=FROM)) == 28
        figures = engine.figures()
        assert figures["pulls"] == 1
        assert figures["pulled_tokens"] == sum(8 if one else 28 for one in windowed)
        assert engine.planner._pulls._pulls == {}


def test_what_is_here_is_not_fetched_again(url, kind):
    with two(url, kind) as (owner, engine):
        owner.decode(Request("a", prompt(41)))
        engine.decode(Request("b", prompt(30)))
        assert engine.decode(Request("c", prompt(33), kv_transfer_params=FROM)) == 32
        assert engine.figures()["pulled_tokens"] == (32 - 28) * 2, "the whole prompt of the window goes on"
        for pulled in ((40 - 32) * 2, 0):
            assert engine.decode(Request("d", prompt(41), kv_transfer_params=FROM)) == 40
            assert engine.figures().get("pulled_tokens", 0) == pulled


def test_a_hit_is_what_all_groups_of_the_owner_have(url, kind):
    with two(url, kind) as (owner, engine):
        owner.decode(Request("a", prompt(30)))
        pool = owner.planner._engine.pool
        with pool.match(prompt(30), "#1") as hit:
            pool.forget(hit.addrs[-2:])
        assert engine.decode(Request("b", prompt(30), kv_transfer_params=FROM)) == 20


def test_a_tail_that_nobody_waits_for_any_more_makes_room(url, kind):
    with two(url, kind) as (owner, engine):
        owner.decode(Request("a", prompt(30)))
        request = engine.start(Request("b", prompt(30), kv_transfer_params=FROM))
        transferred(request, engine)
        engine.finish(request)
        assert engine.planner._pulls._dropped == []
        assert engine.planner._engine.pool.stats().dram.active == 0
        assert engine.decode(Request("c", prompt(30))) == 0
        assert engine.decode(Request("d", prompt(30), kv_transfer_params=FROM)) == 28


def transferred(request, engine):
    """The fetches of a request, whose blocks are here; nobody has cached or freed those of a tail yet."""
    pulls = engine.planner._pulls
    while not pulls._pulls["b"].fetches:
        assert engine.planner.match(request, 0)[0] is None
    for fetch in pulls._pulls["b"].fetches:
        fetch._transfer.wait(20) if hasattr(fetch, "_transfer") else fetch.wait(20)
    return pulls._pulls["b"].fetches


@pytest.mark.parametrize("how", ["looked up again", "ended"])
def test_when_a_worker_is_lost_after_a_fetch_the_engine_goes_on(url, how):
    with two(url, WorkersGroups) as (owner, engine):
        owner.decode(Request("a", prompt(30)))
        request = engine.start(Request("b", prompt(30), kv_transfer_params=FROM))
        fetches = transferred(request, engine)
        engine.workers[1]._rank.close()
        with pytest.raises(kvpool.PeerLost):
            while True:
                engine.index.pool.match(prompt(4)).close()
        if how == "looked up again":
            assert engine.planner.match(request, 0) == (None, False)
            assert engine.planner.match(request, 0) == (0, False)
            assert engine.figures()["failed_pulls"] == 1
            assert all(
                isinstance(fetch.exception(0), kvpool.PeerLost) for fetch in fetches if isinstance(fetch, TailFetch)
            )
        engine.finish(request)
        assert engine.planner._pulls._dropped == []
        engine.pool.audit = lambda: None


def test_the_outcome_of_a_refused_tail_stays():
    freed = []

    def refuse(*_, **how):
        raise kvpool.StateError("the test says so")

    pool = SimpleNamespace(insert=refuse, free=freed.append)
    fetch = TailFetch(pool, SimpleNamespace(exception=lambda _: None, addrs=[7]), Groups(4).part(0, "", [], 0))
    for _ in range(2):
        assert isinstance(fetch.exception(0), kvpool.StateError)
    fetch.drop()
    assert freed == [[7]]


@pytest.mark.parametrize("how", ["a step", "a reset"])
def test_a_tail_that_comes_after_its_request_has_ended_makes_room(url, kind, how, monkeypatch):
    with two(url, kind) as (owner, engine):
        owner.decode(Request("a", prompt(30)))
        request = engine.start(Request("b", prompt(30), kv_transfer_params=FROM))
        transferred(request, engine)
        with monkeypatch.context() as late:
            late.setattr(TailFetch, "done", lambda _: False)
            late.setattr(TailFetch, "cancel", lambda _: False)
            engine.finish(request)
        assert len(engine.planner._pulls._dropped) == 1
        engine.step({}) if how == "a step" else engine.planner.reset()
        assert engine.planner._pulls._dropped == []
        assert engine.planner._engine.pool.stats().dram.active == 0
