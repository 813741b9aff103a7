"""The default policy: what it charges for copies of prefixes, and for which ones it does not."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy.fleet import BLOCK, Curved, Fleet, UnitModel, prompt, transfer

from kvpool.errors import ArgumentError
from kvpool.policy.routing import KeepHits, QueuePlusExec
from kvpool.policy.routing.policies import Asked
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


@pytest.mark.parametrize(("wait", "instance"), [(1.9, 1), (2.1, 2), (28.0, 2)])
def test_the_cheap_beginning_of_a_long_prompt_is_charged_as_such(wait, instance):
    """Instance 1 holds 4 of 65 blocks, 0.256 s; another that gets nothing new holds 64 of them, 65.5 s."""
    fleet = Fleet(3, model=Curved(), policy=KeepHits(7.0))
    others(fleet, 3000)
    fleet.hold(1, prompt(4))
    fleet.hold(3, prompt(64))
    fleet.scheduler.drain(3)
    busy(fleet, i1=wait + 0.5, i2=0.5)
    assert fleet.route(prompt(65)).instance == instance  # at most 8 * 0.256 s


@pytest.mark.parametrize(("wait", "instance"), [(210.0, 1), (235.0, 2)])
def test_the_dear_end_of_a_long_prompt_is_charged_as_such(wait, instance):
    """Instance 2 lacks the last quarter of what instance 1 holds: 28.7 of 65.5 s, and within one part of the charge."""
    fleet = Fleet(2, model=Curved(), policy=KeepHits(7.0))
    others(fleet, 3000)
    fleet.hold(1, prompt(64))
    fleet.hold(2, prompt(48))
    busy(fleet, i1=wait + 0.5, i2=0.5)
    assert fleet.route(prompt(65)).instance == instance  # 8 * 28.7 s, less the share of one use


@settings(max_examples=60)
@example(Curved(), 7.0, [(0, 0.5), (32, 200.5), (64, 600.5)], None)  # what the second one saves is the cheaper half
@given(
    st.sampled_from([UnitModel(), Curved()]),
    st.sampled_from([1.0, 7.0]),
    st.lists(
        st.tuples(st.sampled_from([0, 8, 32, 64]), st.integers(0, 60).map(lambda tens: 10.0 * tens + 0.5)),
        min_size=3,
        max_size=5,
    ),
    st.sampled_from([None, None, transfer(0.05), transfer(0.001, latency_s=3.0)]),
)
def test_a_request_waits_for_what_it_saves_and_the_thrift_at_most(model, thrift, instances, link):
    """(blocks that it holds, backlog) of each: none would begin the prompt so much sooner."""
    fleet = Fleet(len(instances), model=model, policy=KeepHits(thrift), transfer=link)
    others(fleet, 40)
    for at, (blocks, backlog) in enumerate(instances, start=1):
        fleet.hold(at, prompt(blocks))
        busy(fleet, **{f"i{at}": backlog})
    chosen = fleet.route(prompt(65)).instance
    needs = [model.exec_s(65 * BLOCK, blocks * BLOCK) for blocks, _ in instances]
    for at, (_, backlog) in enumerate(instances):
        saved = needs[at] - needs[chosen - 1]
        assert instances[chosen - 1][1] <= backlog + saved + thrift * max(0.0, saved) + 1e-6


def test_what_can_be_fetched_is_charged_by_the_time_of_fetching():
    """Instance 1 holds 36 of 40 tokens and is busy for 200 s. A fetch of a millisecond a token makes a copy cheap."""

    def chosen(wait=200.0, **options):
        fleet = Fleet(2, **options)
        others(fleet, 3000)
        fleet.hold(1, prompt(9))
        busy(fleet, i1=wait + 0.5, i2=0.5)
        decision = fleet.route(prompt(10))
        return decision.instance, decision.fetch is not None

    assert chosen() == (1, False)
    assert chosen(transfer=transfer(0.001)) == (2, True)
    assert chosen(wait=35.0, transfer=transfer(0.001)) == (1, False)  # eq. 1 itself knows no fetch
    assert chosen(transfer=transfer(5.0)) == (1, False)  # slower than computing
    assert chosen(transfer=transfer(0.001), holders_max=0) == (1, False)  # nothing is ever fetched
    assert chosen(wait=75.0, transfer=transfer(1e-9, latency_s=5.0)) == (2, True)  # 36 + 7 * 5 s at most
    assert chosen(wait=65.0, transfer=transfer(1e-9, latency_s=5.0)) == (1, False)


@pytest.mark.parametrize(("wait", "instance"), [(155.0, 1), (170.0, 2)])
def test_one_use_is_half_of_what_makes_a_prefix_popular_at_the_start(wait, instance):
    """The first request of all: half of the thrift is charged, 36 + 3.5 * 36 s."""
    fleet = Fleet(2, policy=KeepHits(7.0))
    fleet.hold(1, prompt(9))
    busy(fleet, i1=wait + 0.5, i2=0.5)
    assert fleet.route(prompt(10)).instance == instance


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
        counted = uses.look_up(tokens, len(tokens), BLOCK, namespace)
        requests = uses.requests + 1
        uses.note(window)
        lengths = [end for end, _ in counted]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == len(tokens)
        now.append({(namespace, end, names[end // BLOCK - 1]) for end in lengths})
        counts = Counter(key for each in (*before, *now) for key in each)
        assert [count for _, count in counted] == [counts[namespace, end, names[end // BLOCK - 1]] for end in lengths]
        assert requests == len(before) + len(now)


def test_where_a_prefix_that_many_share_ends_is_counted_too():
    """Sessions begin with 9 blocks, which is held of each first prompt; that length is no power of four."""
    uses = Uses()
    for number in range(30):
        tokens = prompt(12, fork=9, fork_name=100 + number)
        uses.look_up(tokens, 9 * BLOCK, BLOCK, "")
        uses.note(100)
        counted = dict(uses.look_up(tokens, 11 * BLOCK, BLOCK, ""))
        uses.note(100)
        assert (counted[9 * BLOCK], counted[11 * BLOCK]) == (2 * number + 2, 1)


def test_uses_forget_what_is_long_ago():
    uses = Uses()
    for number in range(10_000):
        uses.look_up(prompt(64, name=number), 64 * BLOCK, BLOCK, "")
        uses.note(100)
    assert len(uses._now) + len(uses._before) <= 2 * 100 * 13
    assert len(uses._held) <= 101
    assert uses.look_up(prompt(1, name=1), 0, BLOCK, "") == []


@pytest.mark.parametrize("thrift", [-1.0, float("nan"), float("inf")])
def test_thrift_is_a_finite_number_of_at_least_0(thrift):
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


def test_it_decides_where_prompts_are_computed_and_not_where_they_are_decoded():
    """There it would charge for nothing: no prompt is computed."""
    with pytest.raises(ArgumentError, match="decode_policy"):
        Fleet(1, decode_policy=KeepHits())


def test_each_part_is_charged_what_fetching_it_takes_though_the_one_behind_it_is_popular():
    """12 tokens of a second each, half a second to fetch; the middle four are charged nothing."""
    asked = Asked(prompt(3), "", BLOCK, 12, lambda held: 12.0 - held, 2, lambda tokens: 0.5 * tokens)
    policy = KeepHits(thrift=7.0)
    policy.asked(asked)
    policy._parts = [(8, 7.0), (4, 0.0), (0, 7.0)]
    assert policy._computed(0) == 7.0 * (2.0 + 2.0)
