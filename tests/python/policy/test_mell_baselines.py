"""Best fit, worst fit, load balancing: how they differ, and what all must do."""

from __future__ import annotations

import random

import pytest

from kvpool import ArgumentError, ArgumentTypeError
from kvpool.policy import mell

C = 100


def final(request):
    return 60


MAKERS = {
    "BF": lambda: mell.BestFit(C),
    "WF": lambda: mell.WorstFit(C),
    "BF reserve": lambda: mell.BestFit(C, mell.Overflow.RESERVE, final),
    "LB": lambda: mell.LoadBalance(C),
}


@pytest.mark.parametrize("name", MAKERS)
def test_no_gpu_is_ever_over_full_and_none_is_idle(name):
    scheduler, rng = MAKERS[name](), random.Random(1)
    sizes: dict[int, int] = {}
    count = 0
    for _ in range(300):
        gone = [request for request in sizes if sizes[request] >= 55]
        for request in gone:
            del sizes[request]
        grown = [(request, size + 2) for request, size in sizes.items()]
        sizes.update(grown)
        came = [(count + part, rng.randint(1, 30)) for part in range(rng.randint(0, 2))]
        count += len(came)
        sizes.update(came)
        plan = scheduler.batch(gone, grown, came)
        assert all(0 < used <= C for used in scheduler.gpus.values())
        assert scheduler.gpu_count == len(scheduler.gpus)
        if name != "BF reserve":
            assert sum(scheduler.gpus.values()) == sum(sizes.values())
        if name != "LB":
            assert plan.moves == []
        if name in ("LB", "BF reserve"):
            assert plan.redispatched == []


def test_best_fit_takes_the_fullest_and_worst_fit_the_emptiest_gpu():
    for scheduler, gpu in ((mell.BestFit(C), 0), (mell.WorstFit(C), 1)):
        scheduler.batch(arrivals=[("a", 80), ("b", 70)])
        assert scheduler.batch(arrivals=[("c", 10)]).placed[0].gpu == gpu


def test_the_newest_request_is_dispatched_again_when_a_gpu_overflows():
    scheduler = mell.BestFit(C)
    scheduler.batch(arrivals=[("old", 50), ("new", 50)])
    plan = scheduler.batch(growths=[("old", 51)])
    assert [(move.requests, move.source, move.destination, move.tokens) for move in plan.redispatched] == [
        (("new",), 0, 1, 50)
    ]
    assert (plan.activated, plan.moves) == ((1,), [])


def test_reserving_never_overflows_and_needs_the_final_length():
    scheduler = mell.BestFit(C, mell.Overflow.RESERVE, final)
    scheduler.batch(arrivals=[("a", 1), ("b", 1)])
    assert scheduler.gpus == {0: 60, 1: 60}
    assert scheduler.batch(growths=[("a", 60)]).redispatched == []
    with pytest.raises(ArgumentError, match="final"):
        mell.BestFit(C, mell.Overflow.RESERVE)


def test_the_smallest_sufficient_request_migrates_when_a_gpu_overflows():
    scheduler = mell.LoadBalance(C, gap=1.0, scale_in=0.0)
    scheduler.batch(arrivals=[("a", 60), ("b", 20), ("c", 15), ("d", 90)])
    plan = scheduler.batch(growths=[("a", 70)])
    assert [move.requests for move in plan.moves] == [("c",)]


def test_as_many_requests_migrate_as_it_takes():
    scheduler = mell.LoadBalance(C, gap=1.0, scale_in=0.0)
    scheduler.batch(arrivals=[(number, 10) for number in range(10)])
    plan = scheduler.batch(growths=[(number, 13) for number in range(10)])
    assert len(plan.moves) == 3
    assert sorted(scheduler.gpus.values()) == [39, 91]


def test_load_is_levelled_and_a_gpu_that_is_not_needed_is_drained():
    scheduler = mell.LoadBalance(C, gap=0.25, scale_in=0.0)
    scheduler.batch(arrivals=[("a", 40), ("b", 40), ("c", 90)])
    assert scheduler.batch(departures=["c"]).moves == []
    scheduler.batch(arrivals=[("d", 90)])
    plan = scheduler.batch(departures=["d"], arrivals=[("e", 30)])
    assert (plan.moves, sorted(scheduler.gpus.values())) == ([], [110]) or plan.placed[0].gpu == 1
    drained = mell.LoadBalance(C, gap=1.0, scale_in=0.9)
    drained.batch(arrivals=[("a", 60), ("b", 50)])
    assert drained.gpu_count == 2
    drained.batch(departures=["a"], arrivals=[("c", 30)])
    assert drained.gpu_count == 1


def test_a_request_that_is_longer_than_a_gpu_is_refused():
    for maker in MAKERS.values():
        with pytest.raises(ArgumentError):
            maker().batch(arrivals=[("a", C + 1)])


def state(scheduler):
    return dict(scheduler.gpus), {gpu: scheduler.requests(gpu) for gpu in scheduler.gpus}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("operations", "text"),
    [
        ({"growths": [("a", C + 1)]}, f"from .* to {C + 1} tokens"),
        ({"departures": ["x"]}, "'x' does not run"),
        ({"growths": [("x", 3)]}, "'x' does not run"),
        ({"departures": ["a", "a"]}, "'a' is named twice"),
        ({"departures": ["a"], "growths": [("a", 60)]}, "'a' is named twice"),
        ({"arrivals": [("z", 0)]}, "'z' of 0 tokens"),
        ({"arrivals": [("b", 5)]}, "'b' runs already"),
        ({"arrivals": [("z", 5), ("z", 5)]}, "'z' runs already"),
        ({"arrivals": [("z", C + 1)]}, f"'z' of {C + 1} tokens"),
    ],
)
def test_impossible_operations_are_refused_before_anything_changes(name, operations, text):
    scheduler = MAKERS[name]()
    scheduler.batch(arrivals=[("a", 50), ("b", 40), ("c", 30)])
    before = state(scheduler)
    with pytest.raises(ArgumentError, match=text):
        scheduler.batch(**{"departures": ["c"], **operations})
    if "departures" not in operations:
        with pytest.raises(ArgumentError, match=text):
            scheduler.batch(**operations, **({} if "growths" in operations else {"growths": [("a", 55)]}))
    assert state(scheduler) == before


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("size", [50.5, float("nan"), "60", True])
def test_a_size_that_is_no_int_is_refused_before_anything_changes(name, size):
    scheduler = MAKERS[name]()
    scheduler.batch(arrivals=[("a", 50), ("b", 40)])
    before = state(scheduler)
    for operations in ({"growths": [("b", 41), ("a", size)]}, {"arrivals": [("y", 5), ("z", size)]}):
        with pytest.raises(ArgumentTypeError, match="must be an int"):
            scheduler.batch(departures=[], **operations)
    assert state(scheduler) == before


def test_a_request_that_grows_to_all_of_a_gpu_has_it_alone():
    for name, maker in MAKERS.items():
        scheduler = maker()
        scheduler.batch(arrivals=[("a", 50), ("b", 40)])
        scheduler.batch(growths=[("a", C)])
        assert sorted(scheduler.gpus.values()) == [60 if "reserve" in name else 40, C]


def test_a_final_length_beyond_a_gpu_and_a_request_without_one_are_refused():
    scheduler = mell.BestFit(C, mell.Overflow.RESERVE, {"a": 60, "long": C + 1, "odd": 1.5}.__getitem__)
    scheduler.batch(arrivals=[("a", 1)])
    for error, operations in (
        (ArgumentError, {"arrivals": [("long", 1)]}),
        (ArgumentTypeError, {"arrivals": [("odd", 1)]}),
        (ArgumentError, {"growths": [("b", 2)]}),
    ):
        with pytest.raises(error):
            scheduler.batch(["a"], **operations)
    assert scheduler.gpus == {0: 60}


def test_a_capacity_is_a_number_of_tokens():
    for kind in (mell.BestFit, mell.WorstFit, mell.LoadBalance):
        for capacity in (0, -1):
            with pytest.raises(ArgumentError, match="1 or more"):
                kind(capacity)
        for capacity in (1.5, "100"):
            with pytest.raises(ArgumentTypeError, match="capacity"):
                kind(capacity)
