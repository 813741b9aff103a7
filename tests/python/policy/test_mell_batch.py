"""Batches: valid as a whole, and never more moves than one operation after the other."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mell_kit import CAPACITY, Driver

from kvpool.policy import mell
from kvpool.policy.mell.netting import without_detours
from kvpool.policy.mell.plan import Move

C = CAPACITY


def drawn_batch(rng, driver, most):
    """Departures, growths and arrivals of some requests."""
    requests = list(driver.cluster.sizes)
    rng.shuffle(requests)
    gone = [requests.pop() for _ in range(rng.randint(0, min(most, len(requests))))]
    grown = []
    for _ in range(rng.randint(0, min(3 * most, len(requests)))):
        request = requests.pop()
        size = driver.cluster.sizes[request]
        grown.append((request, min(C, size + rng.choice([1, 3, C // 8, rng.randint(0, C)]))))
    came = []
    for _ in range(rng.randint(0, 2 * most)):
        driver.count += 1
        came.append((driver.count, rng.randint(1, rng.choice([C // 8, C // 4, C // 2, C]))))
    return gone, grown, came


def one_by_one(scheduler, gone, grown, came):
    """Item moves of the same operations, one after the other, in the order that `Mell.batch` names."""
    left = scheduler._grow_freely(list(grown))
    plans = [scheduler.depart(request) for request in gone]
    plans += [scheduler.grow(request, size) for request, size in left]
    plans += [scheduler.allocate(request, size) for request, size in came]
    return sum(plan.item_moves for plan in plans)


@given(st.integers(0, 2**32), st.sampled_from([0, 0, 10]), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_batch_keeps_the_properties_and_moves_no_more_than_single_operations(seed, slack, consolidate, compare):
    rng = random.Random(seed)
    driver = Driver(settings=mell.Settings(slack=slack, consolidate=consolidate, never_more=compare))
    for _ in range(25):
        operations = drawn_batch(rng, driver, 4)
        singly = one_by_one(copy.deepcopy(driver.scheduler), *operations)
        plan = driver.batch(*operations)
        assert plan.item_moves <= mell.MOVES_AN_OPERATION * sum(map(len, operations))
        if compare:
            assert plan.item_moves <= singly


def test_a_batch_saves_moves_over_a_whole_run():
    rng = random.Random(11)
    batched, singly = Driver(), mell.Mell(C)
    moves = [0, 0]
    for _ in range(150):
        operations = drawn_batch(rng, batched, 2)
        moves[0] += batched.batch(*operations).item_moves
        moves[1] += one_by_one(singly, *operations)
    assert moves[0] < 0.9 * moves[1]


def test_an_arrival_takes_the_place_of_a_departure_without_a_move():
    def packed():
        driver = Driver(settings=mell.Settings(consolidate=False))
        driver.batch(arrivals=[(number, C // 2) for number in range(5)])
        return driver

    assert packed().batch(departures=[0], arrivals=[("new", C // 2)]).item_moves == 0
    assert packed().batch(departures=[0]).item_moves == 1


def move(request, source, destination):
    return Move((request,), source, destination, 1)


@pytest.mark.parametrize(
    ("moves", "left"),
    [
        ([], []),
        ([move("a", 1, 2)], [move("a", 1, 2)]),
        ([move("a", 1, 2), move("a", 2, 3)], [move("a", 1, 3)]),
        ([move("a", 1, 2), move("b", 4, 5), move("a", 2, 1)], [move("b", 4, 5)]),
        ([move("a", 1, 2), move("a", 2, 3), move("a", 3, 4)], [move("a", 1, 4)]),
        # Something comes to where it was before: the detour makes room, and is kept.
        ([move("a", 1, 2), move("b", 4, 1), move("a", 2, 3)], [move("a", 1, 2), move("b", 4, 1), move("a", 2, 3)]),
    ],
)
def test_detours_that_free_no_room_are_left_out(moves, left):
    assert without_detours(moves) == left
