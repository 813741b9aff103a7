"""The default policy: what it charges for copies of prefixes, and for which ones it does not."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy.fleet import BLOCK, Fleet, prompt

from kvpool.errors import ArgumentError
from kvpool.policy.routing import KeepHits, QueuePlusExec
from kvpool.policy.routing.uses import Uses


def busy(fleet, **seconds):
    """Gives instances work: i1=5.0."""
    table = fleet.scheduler._prefill
    for name, work in seconds.items():
        table.assign(table.slot(int(name[1:])), work, fleet.now)


def others(fleet, count):
    """Requests that share nothing with the prompts of the tests: they make those unpopular."""
    for number in range(count):
        fleet.serve(prompt(2, name=1000 + number))
    fleet.now += 1e6


def test_a_copy_is_charged_with_the_thrift():
    """Instance 1 holds 36 of 40 tokens: 36 s that instance 2 would have to compute, times 1 + thrift."""
    chosen = {}
    for thrift, wait in ((0.0, 35.0), (0.0, 37.0), (2.0, 105.0), (2.0, 109.0)):
        fleet = Fleet(2, policy=KeepHits(thrift))
        others(fleet, 3000)  # so one use is a small part of an instance's share
        fleet.hold(1, prompt(9))
        busy(fleet, i1=wait + 0.5, i2=0.5)
        chosen[thrift, wait] = fleet.route(prompt(10)).instance
    assert chosen == {(0.0, 35.0): 1, (0.0, 37.0): 2, (2.0, 105.0): 1, (2.0, 109.0): 2}


def test_a_prefix_that_many_prompts_begin_with_is_copied_as_eq_1_would():
    """At first a copy is worth avoiding; once every request begins with it, one instance cannot do them all."""

    def instance_of(prompts_before, same):
        fleet = Fleet(4, policy=KeepHits(thrift=7.0))
        for number in range(prompts_before):
            name = 1 if same else 1000 + number
            fleet.serve(prompt(10, name=name, fork=9, fork_name=5000 + number))
        for at in (1, 2, 3, 4):
            fleet.scheduler.tree(fleet.scheduler._instances[at].kind).forget(at)
        fleet.now += 1e6
        fleet.hold(1, prompt(9))
        busy(fleet, i1=60.0, i2=1.0, i3=1.0, i4=1.0)
        return fleet.route(prompt(10)).instance

    assert instance_of(200, same=False) == 1  # 60 s of waiting against 8 * 36 s
    assert instance_of(200, same=True) == 2  # against 36 s


def test_the_popular_beginning_of_a_rare_prefix_is_not_charged():
    """A conversation of 18 blocks, of which 16 may be what everybody begins with; an instance that lacks them all."""

    def instance_of(shared):
        fleet = Fleet(2, policy=KeepHits(thrift=7.0))
        for number in range(200):
            fleet.serve(prompt(17, name=1 if shared else 1000 + number, fork=16, fork_name=5000 + number))
        for at in (1, 2):
            fleet.scheduler.tree(fleet.scheduler._instances[at].kind).forget(at)
        fleet.now += 1e6
        fleet.hold(1, prompt(18, fork=16, fork_name=7))
        busy(fleet, i1=200.5, i2=0.5)
        return fleet.route(prompt(19, fork=16, fork_name=7)).instance

    assert instance_of(shared=False) == 1  # 200 s of waiting against 8 * 72 s
    assert instance_of(shared=True) == 2  # against 72 + 7 * 2 * 4 s


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.sampled_from([None, 1, 4])), max_size=60),
    st.integers(2, 5),
)
def test_without_thrift_it_is_eq_1(requests, instances):
    fleets = [
        Fleet(instances, policy=policy, learn_at="dispatch") for policy in (KeepHits(thrift=0.0), QueuePlusExec())
    ]
    for number, (name, blocks, fork) in enumerate(requests):
        tokens = prompt(blocks, name=name, fork=fork, fork_name=50 + number)
        assert fleets[0].route(tokens) == fleets[1].route(tokens)
        for fleet in fleets:
            fleet.now += 3.0


@given(
    st.lists(st.tuples(st.sampled_from(["", "a"]), st.lists(st.integers(0, 1), min_size=1, max_size=20)), max_size=60),
    st.integers(1, 9),
)
def test_uses_are_those_of_the_last_windows(asked, window):
    """Beside a list of all prefixes that were asked for."""
    uses, before, now = Uses(), [], []
    for namespace, names in asked:
        tokens = np.repeat(np.int32(names), BLOCK)
        if len(now) >= window:
            before, now = now, []
        counted = uses.note(tokens, len(tokens), BLOCK, namespace, window)
        lengths = [end for end, _ in counted]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == len(tokens)
        now.append({(namespace, end, names[end // BLOCK - 1]) for end in lengths})
        counts = Counter(key for each in (*before, *now) for key in each)
        assert [count for _, count in counted] == [counts[namespace, end, names[end // BLOCK - 1]] for end in lengths]
        assert uses.requests == len(before) + len(now)


def test_where_a_prefix_that_many_share_ends_is_counted_too():
    """Sessions begin with 9 blocks, which is held of each first prompt; that length is no power of four."""
    uses = Uses()
    for number in range(30):
        tokens = prompt(12, fork=9, fork_name=100 + number)
        uses.note(tokens, 9 * BLOCK, BLOCK, "", 100)
        counted = dict(uses.note(tokens, 11 * BLOCK, BLOCK, "", 100))
        assert (counted[9 * BLOCK], counted[11 * BLOCK]) == (2 * number + 2, 1)


def test_uses_forget_what_is_long_ago():
    uses = Uses()
    for number in range(10_000):
        uses.note(prompt(64, name=number), 64 * BLOCK, BLOCK, "", 100)
    assert len(uses._now) + len(uses._before) <= 2 * 100 * 13
    assert len(uses._held) <= 101
    assert uses.note(prompt(1, name=1), 0, BLOCK, "", 100) == []


@pytest.mark.parametrize("thrift", [-1.0, float("nan")])
def test_thrift_is_a_number_of_at_least_0(thrift):
    with pytest.raises(ArgumentError, match="thrift"):
        KeepHits(thrift)


def test_the_default_policy_keeps_hits():
    """Eq. 1 would go to the idle instance after 36 s."""
    fleet = Fleet(2)
    others(fleet, 3000)
    fleet.hold(1, prompt(9))
    busy(fleet, i1=100.0)
    assert fleet.route(prompt(10)).instance == 1


def test_one_policy_is_not_for_two_decisions():
    policy = KeepHits()
    with pytest.raises(ArgumentError, match="KeepHits"):
        Fleet(1, policy=policy, decode_policy=policy)
