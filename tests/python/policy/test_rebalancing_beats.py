"""Who plans: the lowest live instance whose beat goes on."""

from __future__ import annotations

from kvpool.policy.rebalancing import Beats


def test_the_lowest_plans_while_its_beat_goes_on():
    beats = Beats(3, 1.0, 4.0)
    assert [beats.planner({1: now, 2: 0, 7: 0}, now) for now in range(20)] == [1] * 20
    assert beats.planner({7: 0}, 20) == 3
    assert beats.planner({}, 21) == 3


def test_a_planner_whose_beat_stands_still_is_left_out_until_it_goes_on():
    beats = Beats(3, 1.0, 4.0)
    assert [beats.planner({1: 5, 2: now}, now) for now in range(5)] == [1] * 5
    assert [beats.planner({1: 5, 2: now}, now) for now in range(5, 20)] == [2] * 15
    assert beats.planner({1: 6, 2: 20}, 20) == 1


def test_the_next_planner_has_its_time_from_when_it_is_its_turn():
    beats = Beats(3, 1.0, 4.0)
    found = [beats.planner({1: 5, 2: 0}, now) for now in range(12)]
    assert found == [1] * 5 + [2] * 5 + [3] * 2


def test_one_that_was_stopped_itself_does_not_hold_that_against_the_planner():
    beats = Beats(3, 1.0, 4.0)
    assert beats.planner({1: 5}, 0) == 1
    assert [beats.planner({1: 5}, now) for now in (1000, 2000, 3000)] == [1, 1, 1]


def test_one_that_says_no_beat_is_never_left_out():
    beats = Beats(3, 1.0, 4.0)
    assert [beats.planner({1: None}, now) for now in range(20)] == [1] * 20
