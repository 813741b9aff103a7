"""What the global scheduler refuses, and that nothing has changed then."""

from __future__ import annotations

import numpy as np
import pytest
from policy.fleet import BLOCK, Fleet, UnitModel, prompt
from policy.kit import made_model

from kvpool import ArgumentError, StateError
from kvpool.policy import cost, routing
from kvpool.policy.routing import Balance, Kind, QueuePlusExec, SessionId


def test_instances_come_and_go():
    fleet = Fleet(20)  # more than the first arrays have room for
    for instance in (1, 7, 20):
        fleet.scheduler.remove_instance(instance)
    fleet.scheduler.add_instance(7)
    seen = {fleet.route(prompt(1, name=n)).instance for n in range(40)}
    assert seen == set(range(2, 20))
    gone = fleet.route(prompt(3))
    fleet.scheduler.remove_instance(gone.instance)
    fleet.scheduler.first_token(gone.ticket)
    fleet.scheduler.failed(gone.ticket)


def test_a_model_goes_with_the_last_instance_that_has_it():
    """Who rejoins brings a new object: one for each time would make each decision ask all of them."""
    fleet = Fleet(1)
    asked = []

    class Own(UnitModel):
        def __init__(self, factor):
            self.factor = factor

        def exec_s(self, tokens, cached=0):
            asked.append(self.factor)
            return self.factor * super().exec_s(tokens, cached)

    fleet.scheduler.add_instance(2, model=Own(3.0))
    fleet.scheduler.add_instance(3, routing.Kind.DECODE, model=Own(5.0))
    slow = Own(7.0)
    fleet.scheduler.add_instance(4, model=slow)
    fleet.scheduler.add_instance(5, model=slow)
    for time in range(100):
        fleet.scheduler.remove_instance(2)
        fleet.scheduler.add_instance(2, model=Own(100.0 + time))
    fleet.route(prompt(1))
    assert set(asked) == {5.0, 7.0, 199.0}  # and the fleet's
    for gone in (1, 2, 3, 4):
        fleet.scheduler.remove_instance(gone)
    asked.clear()
    assert fleet.route(prompt(1)).exec_s == 7.0 * BLOCK  # its number is another one by now
    assert set(asked) == {7.0}
    fleet.scheduler.remove_instance(5)
    fleet.scheduler.add_instance(6)
    asked.clear()
    assert fleet.route(prompt(1)).exec_s == BLOCK
    assert asked == []


def test_equal_models_are_one():
    fleet = Fleet(1, model=made_model())
    for instance in range(2, 50):
        fleet.scheduler.add_instance(instance, model=made_model())
    assert len(fleet.scheduler._models) == 1
    fleet.scheduler.add_instance(50, model=made_model(cost.Parallel(tp=2)))
    assert len(fleet.scheduler._models) == 2
    with pytest.raises(ArgumentError, match="there already"):
        fleet.scheduler.add_instance(50, model=made_model(cost.Parallel(tp=4)))
    assert len(fleet.scheduler._models) == 2


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: s.route(routing.Request([])), ArgumentError, "no tokens"),
        (lambda s: s.add_instance(1), ArgumentError, "there already"),
        (lambda s: s.add_instance(1 << 14), ArgumentError, "16384"),
        (lambda s: s.add_instance(-1), ArgumentError, "-1"),
        (lambda s: s.add_instance(5, capacity=0), ArgumentError, "capacity"),
        (lambda s: s.add_instance(5, model=made_model()), ArgumentError, "blocks of 16"),
        (lambda s: s.remove_instance(5), ArgumentError, "instance 5"),
        (lambda s: s.drain(5), ArgumentError, "instance 5"),
        (lambda s: s.backlog_s(5), ArgumentError, "instance 5"),
        (lambda s: s.lost_events(5), ArgumentError, "instance 5"),
        (lambda s: s.first_token(99), ArgumentError, "ticket 99"),
        (lambda s: s.finished(99), ArgumentError, "ticket 99"),
        (lambda s: s.failed(99), ArgumentError, "ticket 99"),
    ],
)
def test_bad_input_is_a_typed_error(call, error, text):
    fleet = Fleet(2)
    with pytest.raises(error, match=text):
        call(fleet.scheduler)
    assert {fleet.route(prompt(1)).instance for _ in range(2)} == {1, 2}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Fleet(1, learn_at="never"), "never"),
        (lambda: Fleet(1, holders_max=-1), "-1"),
        (lambda: Fleet(1, ttl_s=0), "ttl_s"),
        (lambda: Balance(cap=0.9), "cap"),
        (lambda: Balance(half_life_s=0), "half_life_s"),
        (lambda: Balance(warmup_floor=0), "warmup_floor"),
        (lambda: Balance(idle=1.5), "idle"),
        (lambda: SessionId(first="x"), "'x'"),
        (lambda: QueuePlusExec(thrift=-1), "thrift"),
        (lambda: SessionId(sessions_max=0), "sessions_max"),
    ],
)
def test_wrong_settings_are_refused(make, text):
    with pytest.raises(ArgumentError, match=text):
        make()


def test_without_an_instance_there_is_no_answer_and_nothing_changes():
    fleet = Fleet(1)
    fleet.scheduler.drain(1)
    with pytest.raises(StateError, match="none of 1 instances takes prompts"):
        fleet.route(prompt(1))
    fleet.scheduler.resume(1)
    prefill_only = Fleet(1, kind=Kind.PREFILL)
    with pytest.raises(StateError, match="none of 0 instances decodes"):
        prefill_only.route(prompt(1))
    assert (prefill_only.scheduler.in_flight, prefill_only.scheduler.backlog_s(1)) == (0, 0.0)
    assert fleet.route(prompt(1)).instance == 1


def test_tokens_of_every_kind_are_the_same_prompt():
    fleet = Fleet(2)
    fleet.hold(2, prompt(3))
    for tokens in (prompt(3), prompt(3).astype(np.int64), prompt(3).tolist(), prompt(3).tobytes()):
        assert fleet.serve(tokens).cached == 3 * BLOCK
