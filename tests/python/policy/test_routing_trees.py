"""What the prompt trees of the global scheduler learn, and what they forget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.fleet import BLOCK, Fleet, UnitModel, prompt

import kvpool
from kvpool.index import StoredEvent
from kvpool.policy.routing import GlobalScheduler, Kind, LongestPrefix, PromptTree, Request


def test_a_tree_learns_at_the_dispatch_unless_it_is_to_learn_at_the_response():
    scheduler = GlobalScheduler(UnitModel(), lambda: 0.0)
    scheduler.add_instance(1)
    scheduler.route(Request(prompt(3)))
    assert scheduler.tree(Kind.COLOCATED).blocks(1) == 3
    fleet = Fleet(2, learn_at="response")
    decision = fleet.route(prompt(3))
    assert fleet.scheduler.tree(Kind.COLOCATED).blocks(decision.instance) == 0
    fleet.scheduler.finished(decision.ticket, prompt(2, name=5).tolist())
    assert fleet.scheduler.tree(Kind.COLOCATED).blocks(decision.instance) == 5
    assert fleet.scheduler.in_flight == 0


def test_at_dispatch_the_same_prompt_follows_into_the_queue():
    for learn_at, cached in (("dispatch", 2 * BLOCK), ("response", 0)):
        fleet = Fleet(2, learn_at=learn_at, policy=LongestPrefix())
        first = fleet.route(prompt(3))
        fleet.now += 4  # 8 s are left, and 8 s of the next prompt are the same
        second = fleet.route(prompt(3, fork=2))
        assert (second.instance == first.instance, second.cached) == (cached > 0, cached)


def test_only_what_a_failed_request_taught_is_taken_back():
    fleet = Fleet(1, learn_at="dispatch")
    tree = fleet.scheduler.tree(Kind.COLOCATED)
    fleet.serve(prompt(2))
    failing = fleet.route(prompt(5))
    assert tree.blocks(1) == 5
    fleet.scheduler.failed(failing.ticket)
    assert (tree.blocks(1), fleet.scheduler.in_flight, fleet.scheduler.backlog_s(1)) == (2, 0, 0.0)
    computed = fleet.route(prompt(5))
    fleet.scheduler.first_token(computed.ticket)
    fleet.scheduler.failed(computed.ticket)  # the client left while it decoded: the prompt is cached
    assert tree.blocks(1) == 5


def test_a_failed_request_does_not_take_back_what_events_have_taught():
    fleet = Fleet(1, learn_at="dispatch")
    fleet.scheduler.set_by_events(1, True)
    tree = fleet.scheduler.tree(Kind.COLOCATED)
    failing = fleet.route(prompt(5))
    fleet.scheduler.apply(1, StoredEvent(1, "", prompt(5), 0, np.empty(0, np.uint64)))
    fleet.scheduler.failed(failing.ticket)  # the client left before the first byte
    assert tree.blocks(1) == 5
    fleet.scheduler.set_by_events(1, False)
    untold = fleet.route(prompt(7))
    fleet.scheduler.failed(untold.ticket)
    assert tree.blocks(1) == 5


@pytest.mark.parametrize("learn_at", ["dispatch", "response"])
@pytest.mark.parametrize("how", ["finished", "failed"])
def test_the_end_of_a_request_says_nothing_of_an_instance_that_came_back_under_the_same_id(learn_at, how):
    """It comes back empty: what the one before has computed is gone."""
    fleet = Fleet(1, learn_at=learn_at)
    scheduler, tree = fleet.scheduler, fleet.scheduler.tree(Kind.COLOCATED)
    late = fleet.route(prompt(5))
    scheduler.remove_instance(1)
    scheduler.add_instance(1)
    if how == "failed":
        fleet.serve(prompt(5))  # which the new one has
    known = tree.blocks(1)
    backlog_s = scheduler.backlog_s(1)
    getattr(scheduler, how)(late.ticket)
    assert (tree.blocks(1), scheduler.backlog_s(1), scheduler.in_flight) == (known, backlog_s, 0)


def test_nor_does_it_of_the_instance_that_decodes():
    fleet = Fleet(1, Kind.PREFILL)
    scheduler = fleet.scheduler
    scheduler.add_instance(2, Kind.DECODE)
    late = fleet.route(prompt(5))
    scheduler.remove_instance(2)
    scheduler.add_instance(2, Kind.DECODE)
    scheduler.finished(late.ticket)
    assert (scheduler.tree(Kind.PREFILL).blocks(1), scheduler.tree(Kind.DECODE).blocks(2)) == (5, 0)


def test_prompts_unused_for_their_time_to_live_are_forgotten():
    fleet = Fleet(2, ttl_s=60.0)
    fleet.hold(1, prompt(4))
    fleet.hold(2, prompt(2))
    fleet.now += 50
    assert fleet.serve(prompt(4)).instance == 1  # a use by instance 1, not by 2
    fleet.now += 20
    assert fleet.scheduler.expire() == 2
    decision = fleet.route(prompt(4))
    assert (decision.instance, decision.holders) == (1, ())
    fleet.now += 61
    assert fleet.scheduler.expire() == 4
    assert Fleet(1, ttl_s=None).scheduler.expire() == 0


def test_looking_a_prompt_up_does_not_count_as_a_use():
    """§6 has a time to live because evictions are not reported: prompts that are no longer sent there must go."""
    fleet = Fleet(2, ttl_s=60.0)
    fleet.hold(2, prompt(4))
    fleet.scheduler.drain(2)
    for _ in range(7):
        fleet.now += 10
        assert fleet.route(prompt(4)).instance == 1
    assert fleet.scheduler.tree(Kind.COLOCATED).match(prompt(4))[0].tolist() == []


@pytest.mark.parametrize("ttl_s", [float("inf"), 1e300, None])
def test_a_time_to_live_without_end(ttl_s):
    fleet = Fleet(1, ttl_s=ttl_s)
    fleet.hold(1, prompt(4))
    fleet.now += 1e12
    assert fleet.scheduler.expire() == 0
    assert fleet.route(prompt(4)).cached > 0


@pytest.mark.parametrize("ask", ["route", "match", "find", "learn"])
def test_the_time_to_live_acts_by_itself_and_to_the_moment(ask):
    fleet = Fleet(2, ttl_s=60.0)
    tree = fleet.scheduler.tree(Kind.COLOCATED)
    fleet.hold(2, prompt(4))
    fleet.now += 59.999
    assert len(tree.find(prompt(4))) == 1  # not before its time
    fleet.now += 0.002
    if ask == "route":
        decision = fleet.route(prompt(4))
        assert (decision.cached, decision.holders) == (0, ())
    elif ask == "match":
        assert [len(each) for each in tree.match(prompt(4))] == [0, 0]
    elif ask == "find":
        assert tree.find(prompt(4)).lengths == []
    else:
        assert tree.insert(prompt(4), 2) == 4  # as if it had never been there


@given(
    st.sampled_from([8.0, 60.0]),
    st.lists(st.tuples(st.sampled_from(["learn", "ask", "tell"]), st.integers(0, 3), st.floats(0, 20)), max_size=80),
)
def test_blocks_are_forgotten_in_time_and_not_before(ttl_s, steps):
    """Beside a list of last uses."""
    now, used, told = 1000.0, {}, set()
    tree = PromptTree(BLOCK, lambda: now, ttl_s)
    for step, name, seconds in steps:
        now += seconds
        if step == "learn":
            tree.insert(prompt(2, name=name), name)
            used[name] = now
        elif step == "tell":
            tree.apply(name, StoredEvent(1, "", prompt(2, name=name), 0, np.empty(0, np.uint64)))
            told.add(name)
        else:
            for each, at in used.items():
                held = tree.match(prompt(2, name=each))[1].tolist()
                if each in told or now - at <= ttl_s - 1e-6:
                    assert held == [2 * BLOCK]
                elif now - at > ttl_s + 1e-6:
                    assert held == []
        tree.audit()


class Watched:
    """An index whose `expire` is another function."""

    def __init__(self, index, expire):
        self.index, self.expire = index, expire

    def __getattr__(self, name):
        return getattr(self.index, name)


def test_a_tree_that_learns_from_events_alone_never_searches_for_old_blocks():
    now = 0.0
    tree = PromptTree(BLOCK, lambda: now, 60.0)
    tree._index = Watched(tree._index, lambda *_: pytest.fail("a look"))
    for number in range(20):
        tree.apply(1, StoredEvent(number, "", prompt(2, name=number), 0, np.empty(0, np.uint64)))
        now += 100.0
        tree.find(prompt(2, name=number))
    assert tree.blocks(1) == 40


def test_no_call_searches_everywhere_for_old_blocks_and_memory_stays_bounded():
    """A prompt a second that is not asked for again, half of each shared with the one before: two nodes for each."""
    now = 1000.0
    tree = PromptTree(BLOCK, lambda: now, 50.0)
    searches, index = [], tree._index

    def expire(before, nodes=None):
        searches.append(nodes)
        return index.expire(before, nodes)

    tree._index = Watched(index, expire)
    for number in range(1000):
        tree.insert(prompt(4, name=number // 2, fork=2, fork_name=10_000 + number), 1)
        now += 1.0
        assert len(index) <= 4 / 3 * 4 * 50
    assert set(searches) == {16}
    now += 100.0
    for _ in range(40):  # what is left of one sweep, and another one
        tree.expire(10)
        tree.audit()
    assert len(index) == 0


def test_events_of_pools_are_followed_and_outlive_the_time_to_live():
    layout = kvpool.KVLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_tokens=BLOCK)
    with kvpool.Pool(layout, 16) as pool:
        stream = pool.subscribe()
        fleet = Fleet(0, ttl_s=60.0)
        fleet.scheduler.add_instance(5, by_events=True)
        fleet.scheduler.add_instance(6)
        pool.insert(prompt(4), pool.alloc(4)).close()

        def follow():
            for event in stream:
                fleet.scheduler.apply(5, event)

        follow()
        fleet.hold(6, prompt(3))
        fleet.now += 1000
        assert fleet.scheduler.expire() == 3
        assert fleet.route(prompt(4)).cached == 4 * BLOCK
        pool.evict(1, kvpool.HBM)
        follow()
        assert fleet.scheduler.tree(Kind.COLOCATED).blocks(5) == 3
        fleet.serve(prompt(7, name=2))  # a response teaches nothing of an instance that says itself what it holds
        assert fleet.scheduler.tree(Kind.COLOCATED).blocks(5) == 3
        fleet.scheduler.lost_events(5)
        assert fleet.scheduler.tree(Kind.COLOCATED).blocks(5) == 0


def test_a_tree_stays_below_its_largest_size():
    """2,000 prompts of 4 to 8 blocks pass two instances, one of which tells by events: 100 blocks are kept."""
    fleet = Fleet(1, blocks_max=100, ttl_s=None)
    fleet.scheduler.add_instance(2, by_events=True)
    tree = fleet.scheduler.tree(Kind.COLOCATED)
    learnt = 0
    for name in range(2000):
        tokens = prompt(4 + name % 5, name=name)
        if name % 2:
            fleet.scheduler.apply(2, StoredEvent(name, "", tokens, 0, np.zeros(0, np.uint64)))
        else:
            fleet.hold(1, tokens)
        learnt += 4 + name % 5
        assert len(tree) == min(learnt, 100)
        assert tree.match(tokens)[1].tolist() == [len(tokens)]
    assert fleet.scheduler.blocks_evicted == tree.evicted == learnt - 100
    assert tree.blocks(1) + tree.blocks(2) == 100
    tree.audit()
    assert [len(tree.match(prompt(4, name=name))[0]) for name in (0, 1900, 1999)] == [0, 0, 1]
