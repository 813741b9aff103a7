"""The breaker: which instances it excludes, and how they come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.control.router import HealthSettings
from kvpool.control.router.health import Breaker, State


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(**settings) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(HealthSettings(**{"fails": 2, "passes": 2, "errors": 3, "backoff_s": 1.0} | settings), clock), clock


def in_state(state: State) -> tuple[Breaker, Clock]:
    breaker, clock = made()
    if state is not State.STARTING:
        breaker.probe_passed()
    if state in (State.OUT, State.TRIAL):
        breaker.probe_failed()
        breaker.probe_failed()
    if state is State.TRIAL:
        clock.now += 1.0
        breaker.probe_passed()
        breaker.probe_passed()
    assert breaker.state is state
    return breaker, clock


def test_an_instance_is_used_as_soon_as_a_probe_passes_and_not_before():
    breaker, _ = made()
    breaker.probe_failed()
    assert breaker.state is State.STARTING
    breaker.probe_passed()
    assert breaker.state is State.HEALTHY


def test_without_probes_every_instance_is_well_at_first():
    assert made(interval_s=0)[0].state is State.HEALTHY


def test_one_error_does_not_count_if_an_answer_follows():
    breaker, _ = in_state(State.HEALTHY)
    for _ in range(10):
        breaker.request_failed()
        breaker.request_failed()
        breaker.answered()
        breaker.probe_failed()
        breaker.probe_passed()
    assert breaker.state is State.HEALTHY


def test_errors_in_a_row_exclude_an_instance_and_so_do_failed_probes():
    breaker, _ = in_state(State.HEALTHY)
    for _ in range(3):
        assert breaker.state is State.HEALTHY
        breaker.request_failed()
    assert breaker.state is State.OUT
    breaker, _ = in_state(State.HEALTHY)
    breaker.probe_failed()
    breaker.probe_failed()
    assert breaker.state is State.OUT


def test_an_excluded_instance_is_tried_only_after_its_time_and_enough_probes():
    breaker, clock = in_state(State.OUT)
    for _ in range(5):
        breaker.probe_passed()
    assert breaker.state is State.OUT
    clock.now += 1.0
    assert breaker.state is State.OUT
    breaker.probe_passed()
    assert breaker.state is State.TRIAL


@pytest.mark.parametrize("ends", [Breaker.request_failed, Breaker.probe_failed])
def test_a_trial_that_fails_doubles_the_time_and_one_that_passes_ends_it(ends):
    breaker, clock = in_state(State.TRIAL)
    ends(breaker)
    assert breaker.state is State.OUT
    clock.now += 1.0
    breaker.probe_passed()
    breaker.probe_passed()
    assert breaker.state is State.OUT  # 2 s now
    clock.now += 1.0
    breaker.probe_passed()
    assert breaker.state is State.TRIAL
    breaker.answered()
    assert breaker.state is State.HEALTHY


def test_probes_alone_end_a_trial_that_gets_no_request():
    breaker, _ = in_state(State.TRIAL)
    breaker.probe_passed()
    assert breaker.state is State.TRIAL
    breaker.probe_passed()
    assert breaker.state is State.HEALTHY


def test_without_probes_time_alone_leads_to_a_trial():
    breaker, clock = made(interval_s=0)
    for _ in range(3):
        breaker.request_failed()
    assert breaker.state is State.OUT
    clock.now += 1.0
    assert breaker.state is State.TRIAL


EVENTS = ["probe_passed", "probe_failed", "answered", "request_failed", "wait"]


@given(st.lists(st.sampled_from(EVENTS), max_size=200), st.sampled_from([0.0, 5.0]))
def test_an_instance_reported_well_comes_back_whatever_happened(history, interval_s):
    breaker, clock = made(interval_s=interval_s, backoff_max_s=30.0)
    for what in history:
        if what == "wait":
            clock.now += 0.7
        elif interval_s or not what.startswith("probe"):
            getattr(breaker, what)()
    clock.now += 30.0
    for _ in range(4):
        if interval_s:
            breaker.probe_passed()
        elif breaker.state is State.TRIAL:
            breaker.answered()
    assert breaker.state is State.HEALTHY
