"""Which instances hold more of a prompt, whether it is fetched, and what their kinds mean for that."""

from __future__ import annotations

import numpy as np
import pytest
from policy.fleet import BLOCK, Fleet, prompt, transfer
from policy.kit import made_model

from kvpool.policy import cost
from kvpool.policy.routing import Holder, Kind, LeastLoad, LongestPrefix

# ---- which instances hold more, and whether to fetch it


def test_instances_that_hold_more_are_listed_with_their_ranges():
    fleet = Fleet(5, policy=LeastLoad(), holders_max=2)
    for instance, blocks in ((2, 3), (3, 7), (4, 7), (5, 9)):
        fleet.hold(instance, prompt(blocks))
    fleet.scheduler._prefill.assign(fleet.scheduler._prefill.slot(3), 1.0, fleet.now)
    decision = fleet.route(prompt(10))
    assert (decision.instance, decision.cached) == (1, 0)
    assert decision.holders == (Holder(5, 0, 36), Holder(4, 0, 28))  # 3 holds as much as 4, and has more to do
    fleet.scheduler.drain(1)
    assert fleet.route(prompt(10)).holders[0] == Holder(5, 12, 36)  # instance 2 has 3 other blocks
    assert decision.fetch is None  # there is no way for it


def test_no_holders_are_listed_on_request():
    fleet = Fleet(2, policy=LeastLoad(), holders_max=0, transfer=transfer(0.1))
    fleet.hold(2, prompt(5))
    decision = fleet.route(prompt(5))
    assert (decision.holders, decision.fetch) == ((), None)


def test_fetching_is_decided_by_equation_2():
    """A prompt of 40 tokens; instance 2 holds 36, 3 holds 20; computing is 1 s a token."""

    def decide(**link):
        fleet = Fleet(3, policy=LeastLoad(), transfer=transfer(**link))
        fleet.hold(2, prompt(9))
        fleet.hold(3, prompt(5))
        return fleet.route(prompt(10))

    cheap = decide(seconds_a_token=0.5)
    assert cheap.fetch == (2, 0, 36, 18.0, 36.0)
    assert cheap.exec_s == 40 - 36 + 18
    assert decide(seconds_a_token=0.5, latency_s=18.0).fetch is not None  # 36 <= 36
    assert decide(seconds_a_token=0.5, latency_s=18.1).fetch is None
    assert decide(seconds_a_token=1.01).fetch is None
    assert decide(seconds_a_token=1.01).exec_s == 40


def test_the_holder_with_the_fastest_fetch_is_chosen():
    """2 holds more, and its link is slow: 40 - 36 + 0.9 * 36 against 40 - 20 + 0.1 * 20."""
    links = {2: transfer(0.9), 3: transfer(0.1), 4: None}
    fleet = Fleet(4, policy=LeastLoad(), transfer=lambda source, to: links[source])
    for instance, blocks in ((2, 9), (3, 5), (4, 10)):
        fleet.hold(instance, prompt(blocks))
    decision = fleet.route(prompt(10))
    assert decision.instance == 1
    assert decision.fetch == (3, 0, 20, pytest.approx(2.0), 20.0)
    assert fleet.scheduler.backlog_s(1) == pytest.approx(22.0)  # fetched tokens are not computed


# ---- kinds of instances


def test_prefill_and_decode_instances_have_separate_trees():
    fleet = Fleet(0)
    for instance, kind in ((1, Kind.PREFILL), (2, Kind.PREFILL), (3, Kind.DECODE), (4, Kind.DECODE)):
        fleet.scheduler.add_instance(instance, kind)
    first = fleet.serve(prompt(5), output=prompt(2, name=9))
    assert (first.instance, first.decode, first.decode_cached) == (1, 3, 0)
    follow_up = np.concatenate([prompt(5), prompt(2, name=9), prompt(1)])
    second = fleet.route(follow_up)
    assert (second.instance, second.cached) == (1, 5 * BLOCK)  # prefill-only: generated tokens are not there
    assert (second.decode, second.decode_cached) == (3, 7 * BLOCK)
    assert second.holders == (Holder(3, 5 * BLOCK, 7 * BLOCK),)


def test_tokens_that_a_decode_instance_generated_can_be_fetched_from_it():
    fleet = Fleet(0, transfer=transfer(0.25))
    fleet.scheduler.add_instance(1, Kind.PREFILL)
    fleet.scheduler.add_instance(3, Kind.DECODE)
    fleet.serve(prompt(5), output=prompt(2, name=9))
    decision = fleet.route(np.concatenate([prompt(5), prompt(2, name=9), prompt(1)]))
    assert decision.fetch == (3, 20, 28, 2.0, 8.0)


def test_decoding_is_spread_by_the_tokens_that_are_decoded():
    fleet = Fleet(0, decode_policy=LeastLoad())
    for instance, kind in ((1, Kind.PREFILL), (3, Kind.DECODE), (4, Kind.DECODE)):
        fleet.scheduler.add_instance(instance, kind)
    decisions = [fleet.route(prompt(blocks)) for blocks in (9, 2, 2, 2)]
    assert [decision.decode for decision in decisions] == [3, 4, 4, 4]
    fleet.scheduler.finished(decisions[0].ticket)
    assert fleet.route(prompt(1)).decode == 3


def test_colocated_and_prefill_instances_compete():
    fleet = Fleet(0, policy=LongestPrefix())
    for instance, kind in ((1, Kind.PREFILL), (2, Kind.COLOCATED), (3, Kind.DECODE)):
        fleet.scheduler.add_instance(instance, kind)
    fleet.hold(1, prompt(4), Kind.PREFILL)
    fleet.hold(2, prompt(6), Kind.COLOCATED)
    decision = fleet.route(prompt(8))
    assert (decision.instance, decision.decode) == (2, None)
    fleet.hold(1, prompt(7), Kind.PREFILL)
    decision = fleet.route(prompt(8))
    assert (decision.instance, decision.decode) == (1, 3)
    fleet.scheduler.drain(1)
    decision = fleet.route(prompt(8))
    assert (decision.instance, decision.holders) == (2, (Holder(1, 24, 28),))


def test_instances_may_differ_in_their_cost():
    fleet = Fleet(1, model=made_model())
    slow = made_model()
    fast = made_model(cost.Parallel(tp=4))
    assert fast.block_tokens == slow.block_tokens
    fleet.scheduler.add_instance(2, model=fast)
    fleet.scheduler.add_instance(3, model=fast)
    tokens = np.arange(1600, dtype=np.int32)
    first, second = fleet.route(tokens), fleet.route(tokens)
    assert {first.instance, second.instance} == {2, 3}
    assert first.exec_s == pytest.approx(fast.exec_s(1600))
    fleet.hold(1, tokens[:1584])
    third = fleet.route(tokens)
    assert (third.instance, third.exec_s) == (1, pytest.approx(slow.exec_s(1600, 1584)))


def test_requests_behind_wait_for_one_stage_of_a_pipeline():
    model = made_model(cost.Parallel(pp=4))
    fleet = Fleet(1, model=model)
    decision = fleet.route(np.arange(640, dtype=np.int32))
    assert decision.exec_s == pytest.approx(model.exec_s(640))
    assert fleet.scheduler.backlog_s(1) == pytest.approx(model.stage_s(640))
    assert model.stage_s(640) < model.exec_s(640) / 2
