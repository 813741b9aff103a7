"""Models whose layers differ: each group of layers is cached, and a prefix is a hit where every group has it."""

from __future__ import annotations

import random

import pytest
from engines.vllm_groups_kit import ApartGroups, Groups
from engines.vllm_kit import Request, prompt

import kvpool
from kvpool.engines.vllm.hits import Hits
from kvpool.engines.vllm.plans import needed_from
from kvpool.engines.vllm.requests import namespaces_of_groups


@pytest.fixture(params=[Groups, ApartGroups], ids=["one process", "two workers"])
def made(request):
    engines = []

    def make(**how):
        engines.append(request.param(**how))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(made):
    return made()


# Whether each group has a window: as in most models that mix them, in the other order, and in a model of windows alone.
KINDS = [(False, True), (True, False), (True,)]


@pytest.fixture(params=KINDS, ids=str)
def any_engine(made, request):
    return made(windowed=request.param)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_a_prompt_that_is_longer_than_the_window_comes_back(any_engine, chunk):
    """Its first blocks were dropped, and written by others, while the prompt was computed."""
    engine = any_engine
    assert engine.run(Request("a", prompt(30)), chunk) == 0
    engine.pool.finish_all()
    engine.run(Request("b", prompt(30, seed=1)), chunk)
    engine.pool.finish_all()
    assert engine.run(Request("c", prompt(30)), chunk) == 28
    assert engine.run(Request("d", prompt(31, seed=1)), chunk) == 28


def test_a_loaded_prompt_that_grows_is_saved_on_from_where_its_window_begins(engine):
    engine.run(Request("a", prompt(20)))
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(60)), 8) == 20
    engine.pool.finish_all()
    assert engine.run(Request("c", prompt(60))) == 56


def test_only_blocks_in_the_window_are_loaded_for_a_windowed_group(engine):
    engine.run(Request("a", prompt(33)))
    engine.pool.finish_all()
    request = engine.start(Request("b", prompt(33)))
    assert engine.admit(request)
    step = engine.planner.plan({}, engine.of.__getitem__)
    assert [(load.group, load.first, len(load.blocks)) for load in step.loads] == [(0, 0, 8), (1, 6, 2)]
    engine._execute(step, {})
    engine.pool.finish_all()
    engine.step({})
    engine.check(request)
    engine.finish(request)


def test_a_hit_is_what_every_group_has(made):
    engine = made()
    engine.run(Request("a", prompt(30)))
    engine.pool.finish_all()
    engine.step({})  # workers report
    pool = engine.planner._engine.pool
    with pool.match(prompt(12), "#1") as hit:
        lost = hit.addrs[2:]
    assert pool.forget(lost) == 7 - 2
    assert engine.run(Request("b", prompt(30))) == 8
    engine.pool.finish_all()
    assert engine.run(Request("c", prompt(30))) == 28, "saved again"


def test_without_the_blocks_before_its_window_a_group_is_not_saved(made):
    """vLLM has dropped them, so nothing can fill the gap that eviction has made."""
    engine = made()
    request = engine.start(Request("a", prompt(40)))
    assert engine.admit(request)
    engine.step({"a": 20})
    engine.pool.finish_all()
    engine.step({})
    while engine.pool.evict(100, kvpool.DRAM):
        pass
    engine.step({"a": 20})
    engine.check(request)
    engine.finish(request)
    engine.pool.finish_all()
    engine.step({})
    pool = engine.planner._engine.pool
    with pool.match(prompt(40), "") as whole, pool.match(prompt(40), "#1") as window:
        assert (whole.tokens, window.tokens) == (40, 0)
    assert engine.run(Request("b", prompt(40))) == 0


@pytest.mark.parametrize("when", ["now", "later"])
def test_a_load_that_fails_is_computed_from_the_first_token_on(any_engine, when):
    """A windowed group has nothing before its window, so the request cannot begin in the middle."""
    engine = any_engine
    engine.run(Request("a", prompt(30)))
    engine.pool.finish_all()
    engine.pool.fail_loads = [*[""] * (len(engine.windowed) - 1), when]
    before = engine.computed_tokens
    request = Request("b", prompt(30))
    engine.start(request)
    assert engine.admit(request)
    failed = set()
    while request.request_id in engine.waiting:
        engine.pool.finish_all()
        failed |= engine.step({})
    assert failed == {"b"}
    assert engine.admit(request)
    assert engine.external["b"] == 0, "a request whose load failed is never looked up again"
    engine.step({"b": 30})
    engine.check(request)
    engine.finish(request)
    assert engine.computed_tokens - before == 30


def test_after_a_failed_load_of_an_aborted_request_its_blocks_are_saved_again(engine):
    """They have wrong content until somebody writes them, and everybody has to know both."""
    engine.run(Request("a", prompt(30)))
    engine.pool.finish_all()
    engine.pool.fail_loads = ["later", "later"]
    request = engine.start(Request("b", prompt(30)))
    assert engine.admit(request)
    engine.step({})
    engine.planner.finish("b")
    while "b" in engine.waiting:  # vLLM keeps the blocks until the load has ended
        engine.pool.finish_all()
        engine.step({})
    engine.finish(request)
    for seed in range(1, 9):
        engine.run(Request(str(seed), prompt(30, seed)))
        engine.pool.finish_all()
    assert not engine.planner._engine.suspects
    for seed in range(5, 9):
        assert engine.run(Request(f"{seed} again", prompt(30, seed))) == 28


@pytest.mark.parametrize("seed", range(6))
def test_many_requests_at_once_with_too_few_blocks(made, seed):
    """Preempted, aborted, evicted and dropped, with loads that fail: what is computed or loaded is always right."""
    dice = random.Random(seed)
    windowed = KINDS[seed % 3]
    engine = made(windowed=windowed, dram_blocks=(7 + 4 * (seed // 2)) * len(windowed))
    running, names = [], iter(range(10_000))
    for _ in range(150):
        what = dice.random()
        if what < 0.3 and len(running) < 4:
            request = Request(str(next(names)), prompt(dice.randint(1, 40), seed=dice.randint(0, 2)))
            engine.start(request)
            if engine.admit(request):
                running.append(request)
            else:
                engine.planner.finish(request.request_id)
                del engine.requests[request.request_id]
        elif what < 0.4:
            engine.pool.finish_all()
        elif what < 0.45:
            engine.pool.fail_loads = [dice.choice(["", "now", "later"])]
        counts = {}
        for request in running:
            left = request.num_tokens - request.num_computed_tokens
            if request.request_id not in engine.waiting and left:
                counts[request.request_id] = dice.randint(1, left)
        engine.step(counts)
        for request in [one for one in running if one.request_id not in engine.of]:  # its load has failed
            if not engine.admit(request):
                engine.finish(request)
                running.remove(request)
        for request in list(running):
            if request.request_id in engine.waiting:
                continue
            engine.check(request)
            if request.num_computed_tokens == request.num_tokens or dice.random() < 0.05:
                engine.finish(request)
                running.remove(request)
            elif dice.random() < 0.1:
                engine.preempt(request)
                if not engine.admit(request):
                    engine.finish(request)
                    running.remove(request)
    engine.pool.finish_all()
    for _ in range(3):
        engine.step({})
    for request in running:
        engine.finish(request)
    engine.pool.finish_all()
    engine.step({})
    assert engine.external


def test_salts_and_groups_do_not_share_names():
    names = [*namespaces_of_groups("", 3), *namespaces_of_groups('["salt", [], []]', 3)]
    assert len(set(names)) == 6
    assert names[0] == ""


def test_the_blocks_that_a_window_needs_are_the_last_ones():
    assert [needed_from(blocks) for blocks in ([], [1, 2], [0, 1], [0, 0, 5], [0])] == [0, 0, 1, 2, 1]


def test_a_match_that_fails_leaves_nothing_pinned():
    closed = []

    class Match:
        def __init__(self, tokens):
            self.tokens = tokens

        def close(self):
            closed.append(self.tokens)

    def match(tokens, namespace):
        if namespace == "gone":
            raise kvpool.PeerLost("a worker is lost")
        return Match(min(len(tokens), int(namespace)))

    hits = Hits()
    with pytest.raises(kvpool.PeerLost):
        hits.find("a", list(range(9)), ["8", "gone"], match)
    assert hits.find("a", list(range(9)), ["8", "0"], match) == 0
    assert hits.find("a", list(range(9)), ["8", "4"], match) == 4
    assert closed == [8, 0, 8] or closed == [8, 8, 0]
    assert hits.take("a", 1).tokens == 4
    assert hits.take("a", 1) is None
    hits.close_all()
    assert hits.take("a", 0) is None
