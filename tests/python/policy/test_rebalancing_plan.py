"""Plans of epochs: a function of the states, with room for all that they ask, and nothing asked twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError
from kvpool.policy.mell import Boundaries, ComputeProfile
from kvpool.policy.rebalancing import (
    SCHEDULERS,
    InstanceState,
    Planner,
    PlanNumber,
    RunningRequest,
    WaitingRequest,
    state_from,
    state_json,
)

C = 96
FIRST = PlanNumber(1, 1)


def state(instance, running=(), waiting=(), **more):
    rows = [each if isinstance(each, RunningRequest) else RunningRequest(*each) for each in running]
    return InstanceState(instance, C, tuple(rows), tuple(WaitingRequest(*each) for each in waiting), **more)


def planner(policy="mell", **options):
    return Planner(SCHEDULERS[policy], **options)


@st.composite
def clusters(draw):
    """States that need not agree: a request may be claimed twice, be on its way, and instances may be too full."""
    found = []
    for instance in draw(st.lists(st.integers(1, 30), unique=True, min_size=1, max_size=6)):
        names = draw(st.lists(st.integers(0, 25), unique=True, max_size=6))
        rows = []
        for name in names:
            to = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
            rows.append((f"r{name}", draw(st.integers(1, C // 2)), draw(st.booleans()) and not to, to))
        waiting = [(f"w{i}", draw(st.integers(1, C + 9))) for i in draw(st.sets(st.integers(0, 9), max_size=3))]
        found.append(
            state(
                instance, rows, waiting, growth=draw(st.integers(0, 9)), rest=draw(st.sampled_from([0, 0, 30])),
                last=PlanNumber(1, draw(st.sampled_from([0, 1, 9, 10]))), idle=draw(st.integers(0, 4)),
                draining=draw(st.sampled_from([False, False, False, True])),
            )
        )  # fmt: skip
    return found


@given(clusters(), st.sampled_from(list(SCHEDULERS)), st.randoms(use_true_random=False))
def test_a_plan_is_possible_and_the_same_for_all(states, policy, random):
    lowest = min(each.instance for each in states)
    rules = planner(policy)
    plan = rules.plan(states, PlanNumber(1, 11), lowest)
    shuffled = [state_from(state_json(each), each.instance) for each in states]
    random.shuffle(shuffled)
    assert planner(policy).plan(shuffled, PlanNumber(1, 11), lowest) == plan

    by_id = {each.instance: each for each in states}
    rows = [(each.instance, row) for each in states for row in each.running]
    used = dict.fromkeys(by_id, 0)
    for instance, row in rows:
        used[instance] += row.tokens + by_id[instance].growth
        if row.to in by_id and sum(other.name == row.name for _, other in rows) == 1:
            used[row.to] += row.tokens + by_id[row.to].growth
    for each in states:
        used[each.instance] += each.rest
    came = dict.fromkeys(by_id, 0)
    for move in plan.moves:  # each as if no other move of the plan were ever made
        claims = [(at, row) for at, row in rows if row.name == move.request]
        assert claims == [(move.source, claims[0][1])]
        assert claims[0][1].free
        assert not by_id[move.destination].draining
        came[move.destination] += move.tokens + by_id[move.destination].growth
    for place in plan.placed:
        one = next(one for one in by_id[place.holder].waiting if one.name == place.request)
        assert all(row.name != place.request for _, row in rows)
        assert not by_id[place.destination].draining
        came[place.destination] += one.tokens
    for instance, tokens in came.items():
        assert not tokens or used[instance] + tokens <= C, (instance, used, plan)
    asked = [move.request for move in plan.moves] + [place.request for place in plan.placed]
    assert len(asked) == len(set(asked))
    for instance in plan.ends:
        one = by_id[instance]
        assert (one.running, one.waiting, one.rest, came[instance]) == ((), (), 0, 0)
    assert len(states) - len(plan.ends) + plan.starts <= max(8, len(states))
    lagging = {each.instance for each in states if each.last.epoch == 1}
    assert not lagging & {at for move in plan.moves for at in (move.source, move.destination)}


def test_requests_are_put_together_and_the_empty_instance_ends():
    states = [state(1, [("a", 30)], idle=0), state(2, [("b", 30)]), state(5, [("c", 20)])]
    plan = planner().plan(states, FIRST, 1)
    assert len({move.destination for move in plan.moves}) == 1
    assert len(plan.moves) == 2
    assert (plan.ends, plan.starts, plan.deferred) == ((), 0, 0)
    states = [state(1, [("a", 30), ("b", 30), ("c", 20)]), state(2, idle=1), state(5, idle=2)]
    assert planner().plan(states, FIRST, 1).ends == (5,)
    assert planner(instances_min=3).plan(states, FIRST, 1).ends == ()
    assert planner("bf").plan(states, FIRST, 1).ends == (5,)


def test_what_outgrows_its_instance_leaves_and_an_instance_is_started_for_it():
    full = state(3, [("a", 40), ("b", 50)], growth=5)
    plan = planner().plan([full], FIRST, 3)
    assert (plan.moves, plan.starts, plan.deferred) == ((), 1, 1)
    plan = planner().plan([full, state(4)], FIRST, 3)
    assert [(move.source, move.destination) for move in plan.moves] == [(3, 4)]
    assert planner(instances_max=1).plan([full], FIRST, 3).starts == 0


def test_new_requests_begin_where_there_is_room_and_others_wait():
    plan = planner().plan([state(1, [("a", 60)], [("w", 30), ("too long", 97), ("large", 90)])], FIRST, 1)
    assert [tuple(each) for each in plan.placed] == [("w", 1, 1)]
    assert plan.starts == 1


def test_at_the_limit_of_instances_any_room_is_taken():
    states = [state(1, [("a", 35), ("b", 25)], [("w", 36)])]  # an M and a T: another M would stand alone elsewhere
    plan = planner(instances_max=1).plan(states, FIRST, 1)
    assert [tuple(each) for each in plan.placed] == [("w", 1, 1)]
    assert plan.starts == 0


def test_an_instance_that_drains_gives_everything_away_and_then_ends():
    states = [state(1), state(2, [("a", 10), ("b", 20, False)], draining=True)]
    plan = planner().plan(states, FIRST, 1)
    assert [tuple(each) for each in plan.moves] == [("a", 2, 1, 10, "kv")]
    assert plan.ends == ()
    assert planner().plan([state(1), state(2, draining=True)], FIRST, 1).ends == (2,)


def test_an_instance_that_something_is_on_its_way_to_does_not_end():
    leaves = state(1, [("a", 60, False, 2)])
    assert planner().plan([leaves, state(2, draining=True)], FIRST, 1).ends == ()
    assert planner().plan([state(1), state(2, draining=True, arriving=1)], FIRST, 1).ends == ()


def test_what_is_on_its_way_counts_at_both_ends_and_does_not_move_again():
    states = [state(1, [("a", 60, False, 2)]), state(2, [("b", 20)])]
    plan = planner().plan(states, FIRST, 1)
    assert plan.moves == ()
    plan = planner().plan([*states, state(3, [], [("w", 30)])], FIRST, 1)
    assert all(place.destination != 2 for place in plan.placed)
    arrived = [state(1, [("a", 60, False, 2)]), state(2, [("a", 61), ("b", 20)])]
    assert all(move.request != "a" for move in planner().plan(arrived, FIRST, 1).moves)


def test_an_instance_of_another_capacity_is_left_alone():
    other = InstanceState(2, 50, (RunningRequest("a", 10),), (WaitingRequest("w", 10),), idle=9)
    plan = planner().plan([state(1, [("b", 10)]), other], FIRST, 1)
    assert (plan.moves, plan.placed, plan.ends) == ((), (), ())


class Fixed:
    """A scheduler that wants each request on a certain GPU."""

    gpus = dict.fromkeys(range(3), 1)

    def __init__(self, **wanted):
        self.where = wanted.__getitem__

    def adopt(self, running):
        pass

    def batch(self, departures, growths, arrivals):
        pass

    tidy = print


def test_no_move_counts_on_the_room_that_another_one_leaves():
    states = [state(1, [("a", 60)]), state(2, [("b", 50), ("c", 10)]), state(3, [("d", 30)])]
    plan = Planner(lambda capacity: Fixed(a=1, b=2, c=2, d=2)).plan(states, FIRST, 1)
    assert [move.request for move in plan.moves] == ["b", "c"]
    assert plan.deferred == 1
    states = [state(1), state(2, [("b", 50), ("c", 40)]), state(3, [("d", 30)])]
    plan = Planner(lambda capacity: Fixed(b=2, c=2, d=0)).plan(states, FIRST, 1)
    assert [move.request for move in plan.moves] == ["b", "d"]
    assert plan.deferred == 1


def test_what_has_just_arrived_does_not_move_on_while_its_source_does_not_know():
    states = [state(1, [("a", 60, False, 2)]), state(2, [("a", 60), ("b", 5)]), state(3)]
    plan = Planner(lambda capacity: Fixed(a=2, b=2)).plan(states, FIRST, 1)
    assert [move.request for move in plan.moves] == ["b"]


def limits(link=100, compute=0):
    def found(instances):
        return Boundaries(
            lambda source, destination: [("up", source)],
            {("up", each): link for each in instances},
            {each: ComputeProfile({0: compute, 9: compute}) for each in instances},
        )

    return found


def test_a_move_goes_by_tokens_where_the_link_has_no_time_and_waits_where_neither_has():
    states = [state(1, [("a", 20)]), state(2, [("b", 60)])]
    ways = {}
    for link, compute in ((100, 0), (0, 50), (0, 0)):
        plan = planner(boundaries=limits(link, compute)).plan(states, FIRST, 1)
        ways[link, compute] = [move.way for move in plan.moves], plan.deferred
    assert ways == {(100, 0): (["kv"], 0), (0, 50): (["tokens"], 0), (0, 0): ([], 1)}


def test_moves_under_way_use_the_boundary_and_a_large_one_goes_when_nothing_else_does():
    states = [state(1, [("a", 20), ("x", 15, False, 3)]), state(2, [("b", 60)]), state(3, [("c", 80)])]
    assert planner(boundaries=limits(40)).plan(states, FIRST, 1).moves
    assert not planner(boundaries=limits(15)).plan(states, FIRST, 1).moves
    alone = [state(1, [("a", 20)]), state(2, [("b", 60)])]
    assert [each.request for each in planner(boundaries=limits(15)).plan(alone, FIRST, 1).moves] == ["a"]


def test_wrong_arguments():
    for wrong in (
        {"instances_min": 0},
        {"instances_min": 9},
        {"moves_max": -1},
        {"idle_epochs": -1},
        {"behind_max": 0},
    ):
        with pytest.raises(ArgumentError):
            planner(**wrong)
    for states, who in (([state(1)], 2), ([state(1), state(1)], 1), ([], 1)):
        with pytest.raises(ArgumentError):
            planner().plan(states, FIRST, who)
