"""Models whose layers differ: each group of layers is cached, and a prefix is a hit where every group has it."""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
from engines.vllm_groups_kit import ApartGroups, Groups
from engines.vllm_kit import Request, maker, prompt

import kvpool
from kvpool.engines.vllm import beginnings
from kvpool.engines.vllm.groups import Groups as Kinds
from kvpool.engines.vllm.hits import Hit, Hits
from kvpool.engines.vllm.plans import needed_from
from kvpool.engines.vllm.requests import Digests, namespaces_of_groups


@pytest.fixture(params=[Groups, ApartGroups], ids=["one process", "two workers"])
def made(request):
    with maker(request.param) as make:
        yield make


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


def test_a_save_waits_for_those_that_it_goes_on_from():
    """The pool refuses blocks behind a gap, and what is still being saved is one. Each step drops blocks."""
    engine = Groups()
    save, copies = engine.pool.save, {"": [], "#1": []}

    def refusing(tokens, addrs, namespace="", *, first=0, **how):
        if first and any(not copy.done() for copy in copies[namespace]):
            raise kvpool.StateError("the first blocks are not cached")
        copies[namespace].append(save(tokens, addrs, namespace, first=first, **how))
        return copies[namespace][-1]

    engine.pool.save = refusing
    engine.run(Request("a", prompt(40)), chunk=8)
    engine.pool.finish_all()
    assert engine.run(Request("b", prompt(40))) == 36
    engine.close()


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


class Matches:
    """A cache of blocks of one token that has so many of each namespace."""

    def __init__(self, **has: int):
        self.has, self.pinned = has, []

    def __call__(self, tokens, namespace):
        name = namespace.split(":")[0]
        if name == "gone":
            raise kvpool.PeerLost("a worker is lost")
        self.pinned.append(Pin(self, min(len(tokens), self.has.get(name, 0))))
        return self.pinned[-1]


class Pin:
    def __init__(self, cache, tokens):
        self.cache, self.tokens, self.addrs = cache, tokens, np.arange(tokens)

    def close(self):
        self.cache.pinned.remove(self)


def found(match, kinds, ends=()):
    hits = Hits()
    tokens = hits.find("a", np.arange(9, dtype=np.int32), "x", kinds, match, ends)
    firsts = [hits.take("a", group).first for group in range(len(kinds))] if tokens else []
    return tokens, firsts


def test_a_match_that_fails_leaves_nothing_pinned(monkeypatch):
    hits, two = Hits(), Kinds(1, (None, None))
    monkeypatch.setattr(Kinds, "names", lambda self, namespace: [namespace, "gone"])
    match = Matches(x=8)
    with pytest.raises(kvpool.PeerLost):
        hits.find("a", np.arange(9), "x", two, match)
    monkeypatch.undo()
    match = Matches(**{"x": 8, "x#1": 0})
    assert hits.find("a", np.arange(9), "x", two, match) == 0
    assert match.pinned == []
    match = Matches(**{"x": 8, "x#1": 4})
    assert hits.find("a", np.arange(9), "x", two, match) == 4
    assert hits.take("a", 1).match.tokens == 4
    assert hits.take("a", 1) is None
    hits.close_all()
    assert hits.take("a", 0) is None
    assert len(match.pinned) == 1  # what was taken


def test_a_tail_counts_where_the_other_groups_end():
    """A window of 3 tokens: after 8 tokens the next one needs two of them."""
    kinds = Kinds(1, (3, None, 4), tails=True)
    whole = {"x#1": 8, "x": 2, "x#2": 8}
    assert found(Matches(**whole), kinds) == (2, [0, 0, 0])
    assert found(Matches(**whole, **{"x@6": 2}), kinds) == (8, [6, 0, 0])
    assert found(Matches(**whole, **{"x@6": 1}), kinds) == (2, [0, 0, 0])
    assert found(Matches(**whole | {"x#2": 7}, **{"x@6": 2}), kinds) == (2, [0, 0, 0]), "of no use for 7 tokens"
    assert found(Matches(**whole | {"x#2": 7}, **{"x@6": 2, "x@5": 2}), kinds) == (7, [5, 0, 0])
    assert found(Matches(**whole | {"x#2": 0}, **{"x@6": 2}), kinds) == (0, [])
    assert found(Matches(**whole, **{"x@6": 2}), Kinds(1, (3, None, 4))) == (2, [0, 0, 0]), "out of a cluster"


def test_a_tail_before_the_end_of_what_the_others_have_is_found_where_somebody_names_it():
    kinds = Kinds(1, (None, 3), tails=True)
    match = Matches(**{"x": 8, "x#1": 1, "x#1@4": 2})
    assert found(match, kinds) == (1, [0, 0])
    assert found(match, kinds, [6]) == (6, [0, 4])
    assert found(match, kinds, [7, 99, 1]) == (1, [0, 0])
    assert len(match.pinned) == 6


def test_what_a_load_needs_and_a_tail_does_not_have_is_not_read():
    hit = Hit(SimpleNamespace(addrs=np.arange(3)), first=5)
    assert hit.addrs(6, 2).tolist() == [1, 2]
    assert [hit.addrs(4, 1), hit.addrs(6, 3)] == [None, None]
    assert hit.addrs(2, 0).tolist() == []


@pytest.mark.parametrize("count", [0, 2])
def test_a_state_is_loaded_as_one_block_or_not_at_all(count):
    hit = Hit(SimpleNamespace(addrs=np.arange(1)), first=5, state=True)
    assert hit.addrs(5, count) is None
    assert hit.addrs(5, 1).tolist() == [0]
    assert hit.addrs(6, 1) is None


def test_a_tail_is_named_by_all_tokens_before_it():
    kinds = Kinds(4, (None, 6), tails=True)
    tokens = np.arange(28, dtype=np.int32)
    assert [kinds.first_needed(group, 7) for group in (0, 1)] == [0, 5]
    assert [kinds.first_needed(1, blocks) for blocks in range(4)] == [0, 0, 0, 1]
    tail = kinds.part(1, "x", tokens, 5)
    assert tail.tokens.tolist() == list(range(20, 28))
    assert tail.namespace.startswith("x#1@5:")
    other = tokens.copy()
    other[0] = 7
    assert len({kinds.part(1, name, which, 5).namespace for name in "xy" for which in (tokens, other)}) == 4
    assert kinds.part(1, "x", tokens.astype(np.int64), 5).namespace == tail.namespace
    assert kinds.part(1, "x", tokens, 0).namespace == "x#1"
    assert kinds.part(1, "x", tokens, 5, Digests()).namespace == tail.namespace


def test_the_tokens_before_tails_are_read_once():
    """And a few again for each tail, in any order."""
    tokens = np.arange(10_000, dtype=np.int32)
    kinds, digests = Kinds(4, (None, 6), tails=True), Digests()
    for count in (9_000, 4, 8_192, 1_024, 1_020, 8_196, 10_000):
        for seen in (tokens[:count], tokens):
            name = kinds.part(1, "", seen, count // 4, digests).namespace
            assert name.endswith(hashlib.blake2b(tokens[:count].tobytes(), digest_size=16).hexdigest())
    other = tokens.copy()
    other[:9_216] = 0
    assert kinds.part(1, "", other, 2_500, digests).namespace == name, "they were read before"


def test_the_groups_have_a_mark_that_says_their_kinds_windows_and_order():
    assert Kinds(4).mark == ""
    assert Kinds(4, (None, 64, 128)).mark == "[groups all,64,128]"
    assert Kinds(4, (64,)).mark == "[groups 64]"


def test_where_tails_begin_is_remembered_of_those_that_were_used_last(monkeypatch):
    monkeypatch.setattr(beginnings, "_MAX", 3)
    known, tokens = beginnings.Beginnings(), np.arange(100, dtype=np.int32)
    for begin in (20, 40, 60):
        known.add(f"tail {begin}", tokens, begin)
    assert (known.likely(tokens, 59)) == [40, 20]
    assert (known.likely(tokens + 1, 60)) == []
    known.add("tail 20", tokens, 20)
    known.add("another 60", tokens + 1, 60)
    assert [name in known for name in ("tail 20", "tail 40", "tail 60", "another 60")] == [True, False, True, True]
    assert (known.likely(tokens, 100)) == [60, 20]
    assert (known.likely(tokens + 1, 100)) == [60]
    for begin in (4, 8):
        known.add(f"tail {begin}", tokens, begin)
    assert (known.likely(tokens, 100)) == [8, 4]
    assert (known.likely(tokens + 1, 100)) == [60]
    assert (len(known._keys), len(known._begins)) == (3, 3)
