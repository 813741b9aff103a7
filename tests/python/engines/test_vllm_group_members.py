"""Models with windows in a cluster: a receiver gets what the windows need, and every group of layers what it needs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from attach_kit import eventually
from engines.test_vllm_groups import KINDS
from engines.vllm_group_members_kit import MemberGroups, WorkersGroups, evict_all, two
from engines.vllm_kit import LAYOUT, Request, prompt
from engines.vllm_members_kit import TO, connect

import kvpool
from kvpool.engines import packing
from kvpool.engines.vllm import groups
from kvpool.engines.vllm.arrivals import Arrivals
from kvpool.engines.vllm.groups import Groups, places_of
from kvpool.engines.vllm.params import letter, parts

FROM = {"kvpool": {"pull": "prefill-0"}}
ENGINES = {"one worker": MemberGroups, "two workers": WorkersGroups}


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def kind(request):
    return request.param


@pytest.fixture(params=[{}, {"by_layer": True}], ids=["whole", "by layer"])
def in_one_process(request, url):
    with two(url, MemberGroups, **request.param) as pair:
        connect(pair[0])
        yield pair


@pytest.mark.parametrize("windowed", KINDS, ids=str)
def test_a_prompt_is_loaded_by_which_of_windowed_groups_only_the_window_came(url, kind, windowed):
    """Each engine checks the content. After 28 tokens the window of 6 begins in block 5 of 7."""
    with two(url, kind, windowed=windowed) as (prefill, decode):
        told = prefill.prefill(Request("a", prompt(30), kv_transfer_params=TO))
        assert told["kvpool"]["tokens"] == 28
        assert decode.decode(Request("b", prompt(30), kv_transfer_params=told)) == 28
        assert [decode.cached(prompt(30), group) for group in range(len(windowed))] == [
            0 if one else 28 for one in windowed
        ]
        assert prefill.figures()["sent_tokens"] == sum(8 if one else 28 for one in windowed)
        assert "expired_waits" not in decode.figures()
        assert decode.decode(Request("c", prompt(30))) == 28, "from its own cache"


@pytest.mark.parametrize("chunk", [1, 3, 4, 6, 100])
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 30, 32, 33])
def test_prompts_of_any_length_in_chunks_of_any_length(in_one_process, length, chunk):
    """A prompt of whole blocks, too: the receiver computes the last token, and its window begins a token earlier."""
    prefill, decode = in_one_process
    tokens = (length - 1) // 4 * 4
    told = prefill.prefill(Request("a", prompt(length), kv_transfer_params=TO), chunk)
    assert (told and told["kvpool"]["tokens"]) == (tokens or None)
    assert decode.decode(Request("b", prompt(length), kv_transfer_params=told)) == tokens


def test_what_is_sent_by_layer_is_right(url):
    with two(url, MemberGroups, by_layer=True) as (prefill, decode):
        connect(prefill)
        told = prefill.prefill(Request("a", prompt(30), kv_transfer_params=TO))
        assert [send["layerwise"] for send in prefill.pool.sends] == [True, True]
        assert decode.decode(Request("b", prompt(30), kv_transfer_params=told)) == 28


def test_the_next_turn_of_a_conversation_is_sent_and_loaded(url, kind):
    with two(url, kind) as (prefill, decode):
        for turn, length in enumerate((17, 30, 41)):
            told = prefill.prefill(Request(f"a{turn}", prompt(length), kv_transfer_params=TO))
            prefill.figures()
            loaded = (length - 1) // 4 * 4
            assert decode.decode(Request(f"b{turn}", prompt(length), kv_transfer_params=told)) == loaded


def test_a_longer_prompt_begins_where_the_tail_ends(url, kind):
    """Though the group that attends to all tokens has more."""
    with two(url, kind) as (prefill, decode):
        longer = prefill.prefill(Request("a", prompt(40), kv_transfer_params=TO))
        told = prefill.prefill(Request("b", prompt(21), kv_transfer_params=TO))
        assert decode.decode(Request("c", prompt(33), kv_transfer_params=told)) == 20
        assert decode.decode(Request("d", prompt(40), kv_transfer_params=longer)) == 36


def test_salts_stay_apart(url, kind):
    with two(url, kind) as (prefill, decode):
        told = prefill.prefill(Request("a", prompt(30), cache_salt="one", kv_transfer_params=TO))
        assert decode.decode(Request("b", prompt(30), cache_salt="two", kv_transfer_params=told)) == 0
        assert decode.decode(Request("c", prompt(30), cache_salt="one", kv_transfer_params=told)) == 28


@pytest.mark.parametrize("complete", [True, False])
def test_a_prompt_is_there_when_the_blocks_of_all_groups_are(complete):
    """They come one by one, and a receiver that began to load between two of them would compute the prompt."""
    inbox = []
    pool = SimpleNamespace(
        stats=lambda: SimpleNamespace(dram=SimpleNamespace(capacity=8)),
        inbox=SimpleNamespace(on_received=lambda enter: inbox.append(enter) or SimpleNamespace(close=int)),
    )
    arrivals, closed = Arrivals(pool, 60, groups=2), []
    for part, well in zip(parts("id", 2), (True, complete), strict=True):
        assert not arrivals.came("id")
        assert not arrivals.failed("id")
        item = SimpleNamespace(private=letter(part, well), inserted=well, addrs=[1], close=lambda: closed.append(1))
        inbox[0](item)
    assert (arrivals.came("id"), arrivals.failed("id")) == (complete, not complete)
    assert not arrivals.came("other")
    arrivals.let_go("id")
    assert len(closed) == 2
    assert arrivals._pinned == 0
    arrivals.close()


def inbox_of(groups, clock=None):
    """Arrivals, how an item of a prompt enters them, and the items that were closed."""
    entries, closed = [], []
    pool = SimpleNamespace(
        stats=lambda: SimpleNamespace(dram=SimpleNamespace(capacity=8)),
        inbox=SimpleNamespace(on_received=lambda enter: entries.append(enter) or SimpleNamespace(close=int)),
    )
    arrivals = Arrivals(pool, 60, groups=groups, **({"clock": clock} if clock else {}))

    def enter(part, well=True):
        close = lambda: closed.append(part)  # noqa: E731
        entries[0](SimpleNamespace(private=letter(part, well), inserted=well, addrs=[1], close=close))

    return arrivals, enter, closed


@pytest.mark.parametrize("well", [True, False])
def test_a_part_that_comes_after_its_request_has_gone_is_not_pinned(well):
    arrivals, enter, closed = inbox_of(2)
    first, last = parts("id", 2)
    enter(first)
    arrivals.let_go("id")
    assert not arrivals.came("id")
    assert not arrivals.failed("id"), "it may still come"
    enter(last, well)
    assert set(closed) == {first, last}
    assert arrivals._pinned == 0
    assert (arrivals.came("id"), arrivals.failed("id")) == (well, not well)


def test_pins_end_in_time_though_nothing_more_arrives(url):
    with two(url, MemberGroups) as (prefill, decode):
        prefill.prefill(Request("a", prompt(30), kv_transfer_params=TO))
        eventually(lambda: decode.engine._arrivals._pinned == 9)
        decode.clock.now += 1000
        decode.step({})
        assert decode.engine._arrivals._pinned == 0
        assert decode.engine.pool.stats().dram.active == 0


# ---- what is missing is computed


def test_a_part_that_does_not_come_is_a_prompt_that_does_not_come(url):
    """The window's blocks came, and those of all tokens did not."""
    with two(url, MemberGroups) as (prefill, decode):
        connect(prefill)
        prefill.pool.errors = [kvpool.OutOfBlocks("the test says so")]
        request = prefill.start(Request("a", prompt(30), kv_transfer_params=TO))
        assert prefill.admit(request)
        prefill.step({"a": 29})
        assert prefill.planner.answer("a") is None
        told = {"kvpool": {"from": "prefill-0", "id": prefill.planner._outgoing._prompts["a"].id, "tokens": 28}}
        prefill.step({"a": 1})
        prefill.finish(request)
        assert decode.decode(Request("b", prompt(30), kv_transfer_params=told)) == 0
        assert decode.figures()["expired_waits"] == 1
        assert decode.decode(Request("c", prompt(30))) == 28, "which it has computed"


@pytest.mark.parametrize("group", [0, 1])
def test_what_the_receiver_has_lost_of_a_group_is_computed(url, kind, group):
    with two(url, kind) as (prefill, decode):
        told = prefill.prefill(Request("a", prompt(30), kv_transfer_params=TO))
        assert decode.decode(Request("b", prompt(30), kv_transfer_params=told)) == 28
        pool = decode.planner._engine.pool
        part = decode.groups.part(group, "", np.array(prompt(28), np.int32), 5 * group)
        with pool.match(part.tokens, part.namespace) as hit:
            pool.forget(hit.addrs[-1:])
        assert decode.decode(Request("c", prompt(30))) == 0
        assert decode.decode(Request("d", prompt(30))) == 28


@pytest.mark.parametrize("kind", ENGINES.values(), ids=ENGINES)
def test_blocks_that_were_dropped_before_they_were_saved(url, kind):
    """What was evicted cannot be saved again. vLLM still has the window: from its blocks the prompt can be sent."""
    with two(url, kind) as (prefill, decode):
        request = prefill.start(Request("a", prompt(42), kv_transfer_params=TO))
        assert prefill.admit(request)
        prefill.step({"a": 20})
        prefill.advance()
        evict_all(prefill)
        prefill.step({"a": 22})
        told = prefill.finish(request)
        prefill.advance()
        loaded = decode.decode(Request("b", prompt(42), kv_transfer_params=told))
        assert loaded == (40 if kind is MemberGroups else 0)
        assert decode.decode(Request("c", prompt(42))) == 40


def test_a_prompt_of_which_vllm_has_dropped_the_window_is_not_announced(url):
    """It is computed on after a preemption, say, behind the end of what is sent."""
    with two(url, MemberGroups) as (prefill, _):
        request = prefill.start(Request("a", prompt(30), kv_transfer_params=TO))
        assert prefill.admit(request)
        prefill.planner._outgoing._prompts["a"].planned = 0
        request.num_computed_tokens = 29
        dropped = [[1] * 8, [0] * 6 + [2, 3]]
        assert prefill.planner.plan({"a": 1}, lambda _: dropped).sends == []
        assert prefill.finish(request) is None


def test_after_a_gap_nothing_more_is_saved_until_the_request_begins_anew(url, kind):
    with two(url, kind) as (engine, _):
        request = engine.start(Request("a", prompt(60)))
        assert engine.admit(request)
        engine.step({"a": 20})
        engine.advance()
        evict_all(engine)
        saves = []
        begin = engine.planner._saves_of
        engine.planner._saves_of = lambda *how: saves.append(begin(*how)) or saves[-1]
        for _ in range(4):
            engine.step({"a": 8})
            engine.advance()
        assert [len(planned) for planned in saves] == [2, 0, 0, 0]
        assert engine.figures()["failed_saves"] == 1
        engine.preempt(request)
        assert engine.admit(request)
        engine.step({"a": 60})
        engine.finish(request)
        engine.advance()
        assert engine.decode(Request("b", prompt(60))) == 56


@pytest.mark.parametrize("windowed", KINDS, ids=str)
@pytest.mark.parametrize("own_hit", [False, True], ids=["loaded", "local hit"])
def test_what_follows_a_tail_is_saved_and_found(url, kind, windowed, own_hit):
    """Turn by turn: an answer is computed behind the tail, and the next prompt begins with it.

    What vLLM's own cache has is not loaded, and what follows it is saved all the same.
    """
    turns = [(50, 28), (50, 48), (71, 48), (95, 68)]
    with two(url, kind, windowed=windowed) as (prefill, decode):
        told = prefill.prefill(Request("a", prompt(30), kv_transfer_params=TO))
        for number, (length, loaded) in enumerate(turns):
            request = Request(f"b{number}", prompt(length), kv_transfer_params=None if number else told)
            assert decode.decode(request, computed=loaded if own_hit and number else 0) == loaded
        assert "failed_saves" not in decode.figures()


def test_the_tokens_of_a_request_are_hashed_with_those_of_no_other_look_up(url, kind, monkeypatch):
    """A prompt of 131,072 tokens would take the scheduler 0.7 ms each time."""
    monkeypatch.setattr(groups, "Digests", lambda: pytest.fail("all tokens are read again"))
    with two(url, kind) as (owner, engine):
        told = owner.prefill(Request("a", prompt(30), kv_transfer_params=TO), chunk=7)
        assert engine.decode(Request("b", prompt(50), kv_transfer_params=told)) == 28
        owner.decode(Request("c", prompt(30, seed=1)))
        assert engine.decode(Request("d", prompt(30, seed=1), kv_transfer_params=FROM)) == 28


def lose_last(engine, group, first, length):
    """The last block of a group's prompt, or tail, is dropped from the cache."""
    pool = engine.planner._engine.pool
    part = engine.groups.part(group, "", np.array(prompt(length), np.int32), first)
    with pool.match(part.tokens, part.namespace) as hit:
        assert hit.tokens == len(part.tokens)
        pool.forget(hit.addrs[-1:])


@pytest.mark.parametrize("group", [0, 1], ids=["of all tokens", "of the tail"])
@pytest.mark.parametrize("chunk", [1, 100])
def test_what_is_left_of_a_tail_and_of_the_other_group_is_found(url, kind, group, chunk):
    """The tail begins early enough for a prefix that is shorter than both."""
    with two(url, kind) as (prefill, decode):
        told = prefill.prefill(Request("a", prompt(30), kv_transfer_params=TO))
        request = Request("b", prompt(50), kv_transfer_params=told)
        decode.prefill(request, chunk)
        lose_last(decode, group, 5 * group, 48)
        assert decode.decode(Request("c", prompt(60))) == 44
        assert decode.decode(Request("d", prompt(60))) == 56


def test_after_a_preemption_the_tail_is_found_again(url, kind):
    """The prompt is longer than what was announced, and than the tail; other groups have more of it."""
    with two(url, kind) as (prefill, decode):
        prefill.prefill(Request("a", prompt(40), kv_transfer_params=TO))
        told = prefill.prefill(Request("b", prompt(21), kv_transfer_params=TO))
        request = decode.start(Request("c", prompt(33), kv_transfer_params=told))
        decode._admitted(request)
        assert decode.external["c"] == 20
        decode.step({"c": 1})
        decode.advance()
        decode.preempt(request)
        assert decode.planner.match(request, 0)[0] == 20
        decode.finish(request)


def test_an_engine_that_has_a_tail_sends_the_prompt_on(url, kind):
    """With workers in other processes it sends what was saved behind the tail."""
    with two(url, kind) as (owner, engine):
        owner.decode(Request("a", prompt(30)))
        to = {"kvpool": {"pull": "prefill-0", "to": "prefill-0"}}
        told = engine.prefill(Request("b", prompt(50), kv_transfer_params=to), chunk=7)
        assert engine.external["b"] == 28
        assert owner.decode(Request("c", prompt(50), kv_transfer_params=told)) == 48


# ---- all of it


@pytest.mark.parametrize("seed", range(4))
def test_many_prompts_with_little_room(url, kind, seed):
    """Sent, fetched, computed and evicted: what an engine has is right, and it never waits until a deadline."""
    dice = random.Random(seed)
    windowed = (*KINDS, (False, True, True))[seed]
    with two(url, kind, windowed=windowed, dram_blocks=(14 + 3 * seed) * len(windowed)) as (prefill, decode):
        loaded = 0
        for number in range(40):
            tokens = prompt(dice.randint(1, 40), seed=dice.randint(0, 2))
            how = dice.random()
            params = {"kvpool": {"pull": "prefill-0"}} if how < 0.3 else None
            if how > 0.5:
                params = prefill.prefill(Request(f"a{number}", tokens, kv_transfer_params=TO), dice.randint(1, 40))
            elif how > 0.4:
                prefill.decode(Request(f"a{number}", tokens))
            loaded += decode.decode(Request(f"b{number}", tokens, kv_transfer_params=params))
            if dice.random() < 0.1:
                evict_all(dice.choice((prefill, decode)))
        assert loaded


# ---- who does not fit


def test_engines_whose_groups_differ_refuse_each_other():
    """Their windows, or the layers in them."""
    places = [places_of(names) for names in [(["a", "b"], ["c"]), (["a", "c"], ["b"]), (["b", "a"], ["c"])]]
    windows = [(None, 6), (6, None), (None, 8), (None,)]
    of = [(each, places[0]) for each in windows[:3]] + [(windows[3], ""), *((windows[0], each) for each in places[1:])]
    marks = [Groups(4, each, places=place).mark for each, place in of]
    assert Groups(4, *of[0][:1], places=places_of([["a", "b"], ["c"]])).mark == marks[0]
    pools = [kvpool.Pool(LAYOUT, dram_blocks=2, model="m", secret="of the test") for _ in marks]
    try:
        for pool, mark in zip(pools, marks, strict=True):
            packing.declare(pool, packing.CPU_COLUMNS, mark)
        address = pools[0].peers.listen("tcp:127.0.0.1:0")
        for pool in pools[1:]:
            with pytest.raises(kvpool.LayoutMismatch, match=r"groups all,6 of"):
                pool.peers.connect(address)
    finally:
        for pool in pools:
            pool.close()
