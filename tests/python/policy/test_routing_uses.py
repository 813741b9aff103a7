"""How often the beginnings of prompts were asked for: which beginnings, and of whom."""

from __future__ import annotations

import numpy as np
import pytest
from policy.fleet import BLOCK, Fleet, prompt

from kvpool.errors import StateError
from kvpool.policy.routing import Kind, Request
from kvpool.policy.routing.uses import Uses

WINDOW = 10_000


def note(uses, tokens, blocks, namespace=""):
    """Blocks, and how many requests have begun with as many."""
    noted = uses.look_up(tokens, blocks * BLOCK, BLOCK, namespace)
    uses.note(WINDOW)
    return [(length // BLOCK, count) for length, count in noted]


@pytest.mark.parametrize(
    ("blocks", "lengths"),
    [(1, [1]), (2, [1, 2]), (4, [1, 4]), (5, [1, 4, 5]), (16, [1, 4, 16]), (70, [1, 4, 16, 64, 70])],
)
def test_lengths_are_powers_of_four_and_what_is_held(blocks, lengths):
    assert [length for length, _ in note(Uses(), prompt(80), blocks)] == lengths


def test_prompts_that_fork_later_share_the_lengths_before():
    uses = Uses()
    for number in range(3):
        noted = note(uses, prompt(70, fork=20, fork_name=2 + number), 70)
    assert noted == [(1, 3), (4, 3), (16, 3), (64, 1), (70, 1)]


def test_what_a_tenant_holds_most_often_is_counted_for_each_tenant():
    """Sessions of two tenants, with system prompts of 60 and 50 blocks, whose later turns are longer."""
    uses = Uses()
    for session in range(20):
        for namespace, system in (("one", 60), ("two", 50)):
            tokens = prompt(70, fork=system, fork_name=100 + session)
            for turn in range(3):
                noted = dict(note(uses, tokens, system + turn * 3, namespace))
                assert noted[system] == 3 * session + turn + 1


def test_the_tenants_of_the_last_window_are_remembered_and_no_others():
    uses = Uses()
    for number in range(1000):
        uses.look_up(prompt(3), 3 * BLOCK, BLOCK, f"tenant {number}")
        uses.note(10)
    assert len(uses._held) <= 10
    assert len(uses._often) <= 20


def test_how_a_prompt_was_passed_makes_no_difference():
    uses = Uses()
    note(uses, prompt(5), 5)
    assert note(uses, prompt(5).astype(np.int64), 5) == [(1, 2), (4, 2), (5, 2)]


def test_a_request_counts_when_it_is_noted_and_not_when_it_is_looked_up():
    uses = Uses()
    for _ in range(3):
        assert uses.look_up(prompt(1), BLOCK, BLOCK, "") == [(BLOCK, 1)]
    uses.note(WINDOW)
    assert uses.look_up(prompt(1), BLOCK, BLOCK, "") == [(BLOCK, 2)]
    assert uses.look_up(prompt(1), BLOCK, BLOCK, "", again=True) == [(BLOCK, 1)]
    assert uses.requests == 1


def test_a_request_that_is_routed_twice_counts_once():
    """Its first instance was lost, or there was none that decodes."""
    fleet = Fleet(2)
    fleet.hold(1, prompt(5))
    scheduler = fleet.scheduler
    scheduler.failed(scheduler.route(Request(prompt(5))).ticket)
    counted = dict(scheduler._policy._uses._now)
    assert set(counted.values()) == {1}
    scheduler.failed(scheduler.route(Request(prompt(5)), again=True).ticket)
    assert (scheduler._policy._uses._now, scheduler._policy._uses.requests) == (counted, 1)
    scheduler.route(Request(prompt(5)))
    assert scheduler._policy._uses.requests == 2


def test_a_request_that_no_instance_takes_counts_not():
    fleet = Fleet(1, Kind.PREFILL)
    scheduler = fleet.scheduler
    scheduler.add_instance(2, Kind.DECODE)
    scheduler.add_instance(3)  # so there may be one that does both
    scheduler.drain(2)
    scheduler.drain(3)
    with pytest.raises(StateError, match="decodes"):
        scheduler.route(Request(prompt(5)))
    assert scheduler._policy._uses.requests == 0
