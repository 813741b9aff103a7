"""A scheduler takes over requests that run already (`Mell.adopt`): from any placement the properties hold again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError, ArgumentTypeError
from kvpool.policy.mell import BestFit, LoadBalance, Mell, WorstFit

CAPACITY = 96


@st.composite
def placements(draw):
    """Requests on GPUs, each at most C, and sometimes a GPU with more than C in all."""
    sizes = draw(st.lists(st.lists(st.integers(1, CAPACITY), max_size=8), max_size=8))
    over = draw(st.booleans())
    found, name = {}, 0
    for number, each in enumerate(sizes):
        found[number], used = {}, 0
        for size in each:
            if over or used + size <= CAPACITY:
                found[number][f"r{name}"] = size
                used += size
                name += 1
    return found


def placed(scheduler):
    return {number: {r: scheduler.sizes[r] for r in scheduler.requests(number)} for number in scheduler.gpus}


@given(placements())
def test_any_placement_is_taken_over_and_made_legal(running):
    scheduler = Mell(CAPACITY)
    scheduler.adopt(running)
    scheduler.audit()
    assert dict(scheduler.sizes) == {r: size for each in running.values() for r, size in each.items()}
    before = placed(scheduler)
    scheduler.adopt(before)
    scheduler.audit()
    assert placed(scheduler) == before or scheduler.gpu_count <= len(before)
    scheduler.tidy()
    scheduler.audit()
    assert scheduler.gpu_count <= len(before)


@given(placements(), st.lists(st.integers(1, CAPACITY), max_size=6), st.randoms(use_true_random=False))
def test_a_fleet_that_was_taken_over_is_planned_on(running, sizes, random):
    scheduler = Mell(CAPACITY)
    scheduler.adopt(running)
    names = list(scheduler.sizes)
    gone = random.sample(names, len(names) // 3)
    grown = [(r, min(CAPACITY, scheduler.sizes[r] + random.randrange(40))) for r in names if r not in gone]
    scheduler.batch(gone, grown, [(f"n{i}", size) for i, size in enumerate(sizes)])
    scheduler.audit()
    scheduler.tidy()
    scheduler.audit()


@given(st.lists(st.integers(1, CAPACITY), max_size=30))
def test_what_a_scheduler_has_placed_stays_where_it_is(sizes):
    scheduler = Mell(CAPACITY)
    for name, size in enumerate(sizes):
        scheduler.allocate(name, size)
    if scheduler._fleet.mixed is not None:
        return  # it may be like any other GPU by its requests
    before = placed(scheduler)
    other = Mell(CAPACITY)
    other.adopt(before)
    assert placed(other) == before


@pytest.mark.parametrize("make", [BestFit, WorstFit, LoadBalance])
def test_the_baselines_take_over_as_it_is_and_relieve_what_overflows(make):
    scheduler = make(100)
    scheduler.adopt({1: {"a": 60, "b": 30}, 4: {"c": 90}, 5: {}})
    assert dict(scheduler.gpus) == {1: 90, 4: 90}
    assert scheduler.requests(1) == ["a", "b"]
    assert scheduler.where("c") == 4
    plan = scheduler.batch(growths=[("a", 80)])
    assert [move.requests for move in [*plan.moves, *plan.redispatched]] == [("b",)]
    assert scheduler.where("b") == 0


@pytest.mark.parametrize("make", [Mell, BestFit])
def test_what_cannot_run_is_refused_and_nothing_changes(make):
    scheduler = make(100)
    scheduler.adopt({0: {"a": 60}})
    for wrong in ({0: {"a": 0}}, {0: {"a": 101}}, {0: {"a": 1}, 1: {"a": 1}}, {-1: {"a": 1}}):
        with pytest.raises(ArgumentError):
            scheduler.adopt(wrong)
    for wrong in ({0: {"a": 1.5}}, {"x": {"a": 1}}):
        with pytest.raises(ArgumentTypeError):
            scheduler.adopt(wrong)
    assert dict(scheduler.gpus) == {0: 60}
