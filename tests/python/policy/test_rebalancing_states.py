"""What instances publish: it is read as it was written, keeps its limits, and nothing wrong is believed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError
from kvpool.policy.rebalancing import (
    EpochPlan,
    InstanceState,
    Placement,
    PlannedMove,
    PlanNumber,
    RunningRequest,
    WaitingRequest,
    plan_from,
    plan_json,
    state_from,
    state_json,
)

NAMES = st.text(min_size=1, max_size=12)


@st.composite
def states(draw):
    names = draw(st.lists(NAMES, unique=True, max_size=12))
    cut = draw(st.integers(0, len(names)))
    running = []
    for name in names[:cut]:
        to = draw(st.integers(0, 3))
        running.append(RunningRequest(name, draw(st.integers(1, 999)), draw(st.booleans()) and not to, to))
    waiting = tuple(WaitingRequest(name, draw(st.integers(1, 99))) for name in names[cut:])
    number = PlanNumber(draw(st.integers(0, 9)), draw(st.integers(0, 99)))
    return InstanceState(5, 1000, tuple(running), waiting, 16, draw(st.integers(0, 50)), number, 2, draw(st.booleans()))


@given(states())
def test_a_state_is_read_as_it_was_written(state):
    assert state_from(json.loads(json.dumps(state_json(state))), 5) == state


@given(states(), st.integers(300, 700))
def test_a_state_keeps_within_its_bytes_and_loses_no_token(state, bytes_max):
    fields = state_json(state, bytes_max)
    assert len(json.dumps(fields, separators=(",", ":"))) <= bytes_max
    found = state_from(json.loads(json.dumps(fields)), 5)
    tokens = sum(each.tokens for each in found.running) + found.rest
    assert tokens == sum(each.tokens for each in state.running) + state.rest
    assert found.waiting == state.waiting[: len(found.waiting)]
    assert set(found.running) <= set(state.running)


def test_a_thousand_requests_fit_into_the_record_of_a_member():
    running = tuple(RunningRequest(f"request-{i:08}-of-user", 100 + i) for i in range(1000))
    waiting = tuple(WaitingRequest(f"waits-{i}", 10) for i in range(500))
    state = InstanceState(1, 10**6, running, waiting)
    moves = tuple(PlannedMove(f"request-{i:08}-of-user", 1, 2, 100, "kv") for i in range(500))
    plan = EpochPlan(PlanNumber(1, 1), 1, moves).within()
    published = {"state": state_json(state), "plan": plan_json(plan)}
    assert len(json.dumps(published, separators=(",", ":"))) < 56 << 10
    found = state_from(published["state"], 1)
    assert found.rest + sum(each.tokens for each in found.running) == sum(each.tokens for each in running)
    assert min(each.tokens for each in found.running) > max(1, found.rest // 1000)  # the largest are named
    assert plan_from(published["plan"], 1).moves == moves[: len(plan.moves)]
    assert plan.deferred + len(plan.moves) == 500


def test_a_plan_in_which_thousands_are_to_end_keeps_within_its_bytes_and_still_moves_requests():
    moves = tuple(PlannedMove(f"r{number}", 1, 2, 10, "kv") for number in range(1000))
    ends = tuple(range(1, 9000))
    plan = EpochPlan(PlanNumber(1 << 47, 1 << 47), 1, moves, (), 7, ends).within()
    assert len(json.dumps(plan_json(plan), separators=(",", ":"))) <= 12 << 10
    assert plan.ends == ends[: len(plan.ends)]
    assert len(plan.ends) > 200
    assert len(plan.moves) > 200


def test_a_long_queue_leaves_room_for_moves_and_moves_for_the_queue():
    moves = tuple(PlannedMove(f"request-{i}", 1, 2, 100, "kv") for i in range(500))
    placed = tuple(Placement(f"waits-{i}", 1, 2) for i in range(5000))
    for some in (64, 500):
        plan = EpochPlan(PlanNumber(1, 1), 1, moves[:some], placed).within()
        assert len(json.dumps(plan_json(plan), separators=(",", ":"))) <= 12 << 10
        assert len(plan.moves) >= 64
        assert plan.moves == moves[: len(plan.moves)]
        assert plan.placed == placed[: len(plan.placed)]
        assert len(plan.placed) > 200
        assert plan.deferred == some - len(plan.moves)
    assert len(EpochPlan(PlanNumber(1, 1), 1, moves).within().moves) > 2 * len(plan.moves) - 9  # all room is theirs


def test_a_plan_is_read_as_it_was_written():
    plan = EpochPlan(
        PlanNumber(3, 17), 2, (PlannedMove("a", 2, 4, 70, "tokens"), PlannedMove("b", 4, 2, 9, "kv")),
        (Placement("c", 2, 2),), 1, (7, 9), 4,
    )  # fmt: skip
    assert plan_from(json.loads(json.dumps(plan_json(plan))), 2) == plan


STATE = state_json(InstanceState(1, 100, (RunningRequest("a", 5),), (WaitingRequest("b", 5),)))
PLAN = plan_json(EpochPlan(PlanNumber(1, 1), 1, (PlannedMove("a", 1, 2, 5, "kv"),), (Placement("b", 1, 1),)))


@pytest.mark.parametrize(
    "change",
    [
        {"c": 0}, {"c": "many"}, {"g": -1}, {"s": 1.5}, {"n": [1]}, {"n": None}, {"i": True}, {"r": [["a"]]},
        {"r": [["a", 5], ["a", 6]]}, {"r": [["", 5]]}, {"r": [["a", 0]]}, {"r": [["a", 5, -2]]},
        {"r": [["a", 5, 1, 1]]},
        {"r": [["x" * 256, 5]]}, {"w": [["b", 5], ["b", 5]]}, {"w": [[3, 5]]}, {"w": 7}, {"c": 1 << 60},
        {"n": [1, (1 << 53) - 1]}, {"n": [1 << 49, 1]}, {"a": -1},
    ],
)  # fmt: skip
def test_a_wrong_state_is_refused(change):
    with pytest.raises(ArgumentError, match="cannot be"):
        state_from(STATE | change, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"n": [1, -1]}, {"n": [1, (1 << 48) + 1]},
        {"m": [["a", 1, 1, 5, "kv"]]}, {"m": [["a", 1, 2, 5, "by air"]]}, {"m": [["a", 0, 2, 5, "kv"]]},
        {"m": [["a", 1, 2, 5, "kv"], ["a", 1, 3, 5, "kv"]]}, {"p": [["b", 1]]}, {"p": [["b", 1, 1], ["b", 1, 2]]},
        {"e": [0]}, {"s": None}, {"m": [[["a"], 1, 2, 5, "kv"]]},
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused(change):
    with pytest.raises(ArgumentError, match="cannot be"):
        plan_from(PLAN | change, 1)


@pytest.mark.parametrize(("read", "fields"), [(state_from, STATE), (plan_from, PLAN)])
def test_what_another_version_writes_is_left_alone(read, fields):
    assert read(fields | {"v": 2}, 1) is None
    for wrong in ({}, [], None, "state"):
        with pytest.raises(ArgumentError):
            read(wrong, 1)
