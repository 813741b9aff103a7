"""Calls that the global scheduler refuses, without any effect."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from policy.fleet import BLOCK, Fleet, UnitModel, prompt
from policy.kit import made_model

from kvpool import ArgumentError, ArgumentTypeError, StateError
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


def test_a_model_is_forgotten_with_its_last_instance():
    """An instance that rejoins brings a new object: one for each time would make each decision ask all of them."""
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
        (lambda s: s.add_instance(5, capacity=-1), ArgumentError, "capacity"),
        (lambda s: s.add_instance(5, capacity=float("nan")), ArgumentError, "capacity"),
        (lambda s: s.add_instance(5, capacity=float("inf")), ArgumentError, "capacity"),
        (lambda s: s.add_instance(5, capacity=1e308), ArgumentError, "capacity"),  # two of them are infinite
        (lambda s: s.add_instance(5, capacity=1e-300), ArgumentError, "capacity"),
        (lambda s: s.add_instance(5, capacity="1"), ArgumentTypeError, "capacity"),
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
        (lambda: Balance(slack=float("nan")), "slack"),
        (lambda: Balance(warmup_s=float("nan")), "warmup_s"),
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
    others = (tuple(prompt(3).tolist()), bytearray(prompt(3)), array("i", prompt(3).tolist()), list(prompt(3)))
    for tokens in (
        *others,
        memoryview(prompt(3)),
        memoryview(prompt(3).astype(np.int64)),
        array("q", prompt(3).tolist()),
    ):
        assert fleet.serve(tokens, output=tokens).cached == 3 * BLOCK
    assert fleet.serve(range(3 * BLOCK), output=range(BLOCK)).cached == 0
    assert fleet.serve(range(3 * BLOCK)).cached == 3 * BLOCK


WRONG_TOKENS = [
    ([1.5, 2], ArgumentTypeError, r"tokens\[0\] is float"),
    ([1, np.float64(2)], ArgumentTypeError, r"tokens\[1\] is float64"),
    ((1, None), ArgumentTypeError, r"tokens\[1\] is NoneType"),
    (["a"], ArgumentTypeError, r"tokens\[0\] is str"),
    ([[1], [2]], ArgumentTypeError, r"tokens\[0\] is list"),
    ([[1], [2, 3]], ArgumentTypeError, r"tokens\[0\] is list"),
    ("hello", ArgumentTypeError, "str"),
    (None, ArgumentTypeError, "NoneType"),
    ({1: 2}, ArgumentTypeError, "dict"),
    (np.arange(3.0), ArgumentTypeError, "float64"),
    (np.arange(3, dtype=np.uint32), ArgumentTypeError, "uint32"),
    (memoryview(np.arange(3.0)), ArgumentTypeError, "float64"),
    (array("d", [1.0]), ArgumentTypeError, r"tokens\[0\] is float"),
    (np.zeros((2, 2), np.int32), ArgumentError, "one dimension"),
    (np.array(3), ArgumentError, "one dimension"),
    ([1, 2**31], ArgumentError, r"tokens\[1\] = 2147483648 does not fit"),
    ([1, 2**70], ArgumentError, "does not fit"),
    (np.array([1, -(2**31) - 1]), ArgumentError, "does not fit"),
    (b"123", ArgumentError, "3 bytes"),
    (memoryview(b"12345678")[::2], ArgumentError, "4 bytes"),
]


@pytest.mark.parametrize(("tokens", "error", "text"), WRONG_TOKENS)
def test_invalid_tokens_are_refused_as_by_the_index(tokens, error, text):
    fleet = Fleet(2)
    with pytest.raises(error, match=text):
        fleet.route(tokens)
    assert fleet.scheduler.in_flight == 0
    decision = fleet.route(prompt(2))
    with pytest.raises(error, match=text):
        fleet.scheduler.finished(decision.ticket, tokens)
    assert (fleet.scheduler.in_flight, fleet.scheduler.backlog_s(decision.instance)) == (1, 2 * BLOCK)
    assert fleet.scheduler.tree(Kind.COLOCATED).blocks(decision.instance) == 0


def test_policies_that_remember_sessions_do_so_for_one_use():
    """Each use would overwrite where the other one sent a session, and no session would stay anywhere."""
    for one in (SessionId(), SessionId("hash")):
        with pytest.raises(ArgumentError, match="one SessionId"):
            Fleet(0, policy=one, decode_policy=one)
    stateless = routing.LongestPrefix()
    Fleet(0, policy=stateless, decode_policy=stateless)
    fleet = Fleet(0, policy=SessionId(), decode_policy=SessionId())
    for instance in range(4):
        fleet.scheduler.add_instance(instance, Kind.PREFILL)
        fleet.scheduler.add_instance(10 + instance, Kind.DECODE)
    sent = {}
    for turn in range(12):
        decision = fleet.serve(prompt(1, name=turn), session=f"s{turn % 3}")
        chosen = decision.instance, decision.decode
        assert sent.setdefault(f"s{turn % 3}", chosen) == chosen
    assert len(set(sent.values())) == 3


@pytest.mark.parametrize("decoders", ["none", "closed"])
def test_a_policy_learns_of_no_request_that_is_refused(decoders):
    """It would believe that the session has a home, though nothing was computed there."""
    policy = SessionId()
    fleet = Fleet(3, Kind.PREFILL, policy=policy)
    if decoders == "closed":
        fleet.scheduler.add_instance(9, Kind.DECODE)
        fleet.scheduler.drain(9)
    with pytest.raises(StateError, match="decodes what others prefill"):
        fleet.route(prompt(2), session="s")
    assert policy.home("s") < 0
    assert fleet.scheduler.in_flight == 0
    fleet.scheduler.route(routing.Request(prompt(2), "s"), whole=True)
    assert policy.home("s") > 0
