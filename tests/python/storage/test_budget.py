"""How fast a store is written to, and when it is left alone."""

from __future__ import annotations

from kvpool.storage.budget import Breaker, ByteBudget


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_seconds_worth_goes_at_once_and_the_rest_waits():
    clock = Clock()
    budget = ByteBudget(100, clock)
    assert budget.take(60) == 0
    assert budget.take(40) == 0
    assert budget.take(50) == 0.5
    assert budget.take(50) == 1.0  # a later one waits for all before it
    clock.now += 1
    assert budget.take(0) == 0
    clock.now += 1000
    assert budget.take(100) == 0  # no more than a second is saved up
    assert budget.take(300) == 3


def test_without_a_budget_nothing_waits():
    assert ByteBudget(None, Clock()).take(1 << 60) == 0


def test_three_failures_in_a_row_switch_off_and_a_success_on():
    clock = Clock()
    breaker = Breaker(clock)
    assert [breaker.failed(), breaker.failed()] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True]
    assert breaker.off
    assert not breaker.allows()
    clock.now += 1
    assert breaker.allows()  # one tries
    assert not breaker.allows()
    assert breaker.succeeded()
    assert breaker.allows()
    assert not breaker.off


def test_the_pause_doubles_up_to_a_minute():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3):
        breaker.failed()
    pauses = []
    for _ in range(8):
        begin = clock.now
        while not breaker.allows():
            clock.now += 0.25
        pauses.append(clock.now - begin)
        assert not breaker.failed()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_trial_that_never_reports_does_not_keep_it_off():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3):
        breaker.failed()
    clock.now += 1
    assert breaker.allows()
    clock.now += 1
    assert breaker.allows()
