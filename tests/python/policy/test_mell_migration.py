"""Dividing moves between links and computation: no boundary exceeded, nothing lost, the same for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError
from kvpool.policy import mell
from kvpool.policy.mell import Boundaries, ComputeProfile, Fit, Move, divide

GPUS = range(6)


def links(source, destination):
    """Machines of two GPUs: within one its own bus, between two the network of either."""
    first, second = source // 2, destination // 2
    return [("bus", first)] if first == second else [("net", first), ("net", second)]


LINKS = [(kind, machine) for kind in ("bus", "net") for machine in range(3)]
BOUNDARIES = st.builds(
    Boundaries,
    links=st.just(links),
    link_tokens=st.dictionaries(st.sampled_from(LINKS), st.integers(0, 100)),
    compute=st.dictionaries(
        st.sampled_from(GPUS),
        st.builds(ComputeProfile, st.dictionaries(st.integers(0, 8), st.integers(0, 60), min_size=1)),
    ),
)


@st.composite
def plans(draw):
    """Moves of distinct requests, all of which have room one after the other, and what is free before them."""
    moves = []
    free = {gpu: draw(st.integers(0, 50)) for gpu in GPUS}
    room = dict(free)
    for number in range(draw(st.integers(0, 15))):
        source, destination = draw(st.permutations(GPUS))[:2]
        tokens = draw(st.integers(1, 40))
        if room[destination] >= tokens:
            room[destination] -= tokens
            room[source] += tokens
            moves.append(Move((number,), source, destination, tokens))
    return moves, free


@given(plans(), BOUNDARIES, st.dictionaries(st.sampled_from(GPUS), st.integers(0, 10)), st.sampled_from(Fit))
def test_no_boundary_is_exceeded_and_every_move_is_planned(plan, boundaries, batches, fit):
    moves, free = plan
    found = divide(moves, boundaries, batches, free, fit)
    assert sorted(found.as_kv + found.as_tokens + found.deferred, key=moves.index) == moves
    use = {}
    for move in found.as_kv:
        for link in links(move.source, move.destination):
            use[link] = use.get(link, 0) + move.tokens
    assert use == found.link_use
    assert all(tokens <= boundaries.link_tokens.get(link, 0) for link, tokens in use.items())
    for gpu in GPUS:
        prefilled = sum(move.tokens for move in found.as_tokens if move.destination == gpu)
        assert prefilled == found.compute_use.get(gpu, 0)
        profile = boundaries.compute.get(gpu)
        assert prefilled <= (profile.boundary(batches.get(gpu, 0)) if profile else 0)
    assert divide(list(moves), boundaries, dict(batches), dict(free), fit) == found  # on every instance
    made = [move for move in moves if move not in found.deferred]
    for move in made:
        assert free[move.destination] >= move.tokens
        free[move.destination] -= move.tokens
        free[move.source] += move.tokens


WIDE = dict.fromkeys(LINKS, 100)


def test_kv_goes_first_then_tokens_and_the_rest_waits():
    moves = [Move((number,), 0, 2, 40) for number in range(4)]
    boundaries = Boundaries(links, {("net", 0): 80, ("net", 1): 100}, {2: ComputeProfile({8: 50})})
    found = divide(moves, boundaries, {2: 3})
    assert (found.as_kv, found.as_tokens, found.deferred) == (moves[:2], moves[2:3], moves[3:])
    assert found.link_use == {("net", 0): 80, ("net", 1): 80}
    assert found.compute_use == {2: 40}


def test_best_fit_spreads_over_both():
    moves = [Move((number,), 0, 2, 40) for number in range(3)]
    boundaries = Boundaries(links, WIDE, {2: ComputeProfile({8: 200})})
    found = divide(moves, boundaries, {}, fit=Fit.BEST)
    assert (len(found.as_kv), len(found.as_tokens)) == (1, 2)


def test_a_link_that_two_sources_share_is_shared():
    """Fig 9: GPU 1 and GPU 2 migrate to GPU 4; each alone would not exceed the link."""
    moves = [Move(("a",), 0, 4, 60), Move(("b",), 2, 4, 60)]
    found = divide(moves, Boundaries(links, WIDE, {}), {})
    assert (found.as_kv, found.deferred) == (moves[:1], moves[1:])


def test_a_move_that_needs_the_room_of_a_deferred_one_waits_with_it():
    moves = [Move(("a",), 0, 2, 70), Move(("b",), 4, 0, 30)]
    boundaries = Boundaries(links, WIDE | {("net", 1): 10}, {})
    assert divide(moves, boundaries, {}, free={0: 0, 2: 100}).deferred == moves
    assert divide(moves, boundaries, {}, free={0: 30, 2: 100}).as_kv == moves[1:]


def test_a_request_moves_on_only_after_it_has_arrived():
    moves = [Move(("a",), 0, 2, 70), Move(("a",), 2, 3, 70)]
    boundaries = Boundaries(links, WIDE | {("net", 0): 10}, {})
    assert divide(moves, boundaries, {}).deferred == moves


def test_a_batch_uses_the_measurement_of_a_larger_one():
    profile = ComputeProfile({1: 500, 8: 300, 16: 0})
    assert [profile.boundary(batch) for batch in (0, 1, 2, 8, 9, 16, 17)] == [500, 500, 300, 300, 0, 0, 0]
    for wrong in ({}, {1: -1}, {-1: 1}):
        with pytest.raises(ArgumentError):
            ComputeProfile(wrong)


def test_the_moves_of_a_scheduler_have_room_in_order():
    scheduler = mell.Mell(1000)
    scheduler.batch(arrivals=[(number, 200) for number in range(20)])
    free = {gpu: 1000 - used for gpu, used in scheduler.gpus.items()}
    plan = scheduler.batch(growths=[(number, 240) for number in range(20)])
    everywhere = [(kind, machine) for kind in ("bus", "net") for machine in range(9)]
    roomy = Boundaries(links, dict.fromkeys(everywhere, 10**6), {})
    free.update(dict.fromkeys(plan.activated, 1000))
    assert plan.moves
    assert divide(plan.moves, roomy, {}, free).as_kv == plan.moves
