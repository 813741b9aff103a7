"""The scheduler of MELL: capacity, the five properties, ten moves, and the bound, after every operation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mell_kit import CAPACITY, Driver, operations

from kvpool import ArgumentError, ArgumentTypeError, AuditError
from kvpool.policy import mell
from kvpool.policy.mell import Class

C = CAPACITY
SETTINGS = st.builds(
    mell.Settings,
    slack=st.sampled_from([0, 0, 5, C // 16, C // 4]),
    consolidate=st.booleans(),
    reserve=st.sampled_from([0, 0, 10]),
    weights=st.sampled_from([mell.Weights(), mell.Weights(-1.0, 0.1, 0.5)]),
)


@given(SETTINGS, st.lists(operations(), max_size=120))
@settings(deadline=None)
def test_the_properties_hold_after_every_operation(chosen, drawn):
    driver = Driver(settings=chosen)
    for operation in drawn:
        driver.step(*operation)


@given(st.integers(8, 100), st.data())
@settings(deadline=None)
def test_any_capacity_works(capacity, data):
    driver = Driver(capacity)
    for operation in data.draw(st.lists(operations(capacity), max_size=60)):
        driver.step(*operation)


@given(st.integers(0, 2**32), st.sampled_from(["small", "mixed", "large"]))
@settings(deadline=None, max_examples=15)
def test_the_properties_hold_with_many_requests(seed, kind):
    """Hundreds of requests, so that all structures have something in them."""
    rng = random.Random(seed)
    driver = Driver(capacity=10_000)
    highest = {"small": 2_500, "mixed": 6_000, "large": 10_000}[kind]
    for _ in range(400):
        grow = rng.random() < 0.4
        size = rng.randint(1, rng.choice([highest, highest // 4, highest // 8]))
        driver.step(
            "grow" if grow else rng.choice(["arrive", "arrive", "arrive", "depart"]), rng.randrange(10_000), size
        )


def test_an_adversary_finds_no_more_than_ten_moves():
    """Of some operations at each step the one with the most moves is made; consolidation would tidy up: off."""
    worst = 0
    for seed in range(4):
        rng = random.Random(seed)
        driver = Driver(settings=mell.Settings(consolidate=False))
        for _ in range(90):
            if len(driver.cluster.sizes) < 30:
                driver.step("arrive", 0, rng.choice([rng.randint(30, 60), rng.randint(60, 120), rng.randint(120, C)]))
                continue
            tried = [
                (rng.choice(["grow", "grow", "grow", "depart"]), rng.randrange(10_000), rng.randint(60, C))
                for _ in range(8)
            ]
            moves = [_moves_of(driver, operation) for operation in tried]
            worst = max(worst, driver.step(*tried[moves.index(max(moves))]))
    assert 5 <= worst <= mell.MOVES_AN_OPERATION


def _moves_of(driver, operation):
    """How many moves an operation would make, from a copy of the placement."""
    copy = Driver(settings=mell.Settings(consolidate=False))
    copy.count = driver.count
    for request, size in driver.cluster.sizes.items():
        copy.scheduler._fleet.put(request, size, driver.cluster.where[request])
    copy.cluster.sizes = dict(driver.cluster.sizes)
    copy.cluster.where = dict(driver.cluster.where)
    copy.cluster.active = set(driver.cluster.active)
    return copy.step(*operation)


def test_two_schedulers_with_the_same_input_plan_the_same():
    first, second = Driver(settings=mell.Settings(slack=10)), Driver(settings=mell.Settings(slack=10))
    rng = random.Random(7)
    for _ in range(300):
        operation = (rng.choice(["arrive", "arrive", "grow", "depart"]), rng.randrange(10_000), rng.randint(1, C))
        assert first.step(*operation) == second.step(*operation)
        assert first.cluster.where == second.cluster.where


# ---- one case each


def test_small_requests_share_a_gpu():
    driver = Driver()
    driver.batch(arrivals=[(number, C // 8) for number in range(8)])
    assert driver.scheduler.gpu_count == 1


def test_a_t_goes_beside_an_l():
    driver = Driver()
    driver.batch(arrivals=[("large", C // 2 + 1)])
    plan = driver.batch(arrivals=[("tee", C // 4)])
    assert plan.placed[0].gpu == driver.scheduler.where("large")
    assert plan.activated == ()


def test_an_m_goes_beside_an_l_and_t_make_room_for_it():
    driver = Driver()
    driver.batch(arrivals=[("large", 130), ("tee", 60)])
    plan = driver.batch(arrivals=[("mid", 110)])
    assert driver.scheduler.where("mid") == driver.scheduler.where("large") != driver.scheduler.where("tee")
    assert [move.requests for move in plan.moves] == [("tee",)]


def test_an_m_that_is_beside_an_l_already_counts():
    """Fig 10 compares with the L alone: 0.51 + 0.26 + 0.26 of C would be on one GPU."""
    driver = Driver(capacity=100)
    driver.batch(arrivals=[("large", 51), ("first", 26)])
    driver.batch(arrivals=[("second", 26)])
    assert driver.scheduler.where("second") != driver.scheduler.where("large")


def test_growth_within_a_class_makes_room_before_it_is_written():
    """T on a T-GPU: the printed Update speaks of growth into another class only."""
    driver = Driver(capacity=100)
    driver.batch(arrivals=[(number, 20) for number in range(5)])
    assert driver.scheduler.gpu_count == 1
    plan = driver.batch(growths=[(0, 21)])
    assert plan.item_moves == 1
    assert driver.scheduler.gpu_count == 2


def test_a_t_that_becomes_s_goes_beside_an_l_even_where_it_would_complete_its_own_gpu():
    driver = Driver(capacity=1000, settings=mell.Settings(consolidate=False))
    driver.batch(arrivals=[("a", 300), ("b", 300), ("tee", 250)])
    driver.batch(arrivals=[("large", 740)])
    assert driver.scheduler.where("tee") == driver.scheduler.where("a")
    driver.batch(growths=[("tee", 255)])
    assert driver.scheduler.where("tee") == driver.scheduler.where("large")


def test_an_l_that_grows_over_its_m_gets_what_still_fits():
    driver = Driver(capacity=1000, settings=mell.Settings(consolidate=False))
    driver.batch(arrivals=[("large", 510), ("mid", 480), ("s1", 300), ("s2", 300), ("s3", 300)])
    driver.batch(growths=[("large", 600)])
    assert driver.scheduler.where("mid") != driver.scheduler.where("large")
    partners = [name for name in ("s1", "s2", "s3") if driver.scheduler.where(name) == driver.scheduler.where("large")]
    assert len(partners) == 1


def test_the_requests_of_several_open_gpus_are_put_on_one():
    """An M, two S and a T each have an open GPU of their own by the properties; they fit on one."""
    arrivals = [("mid", 340), ("s", 260), ("tee", 200)]
    apart = Driver(capacity=1000, settings=mell.Settings(consolidate=False))
    together = Driver(capacity=1000)
    for entry in arrivals:
        apart.batch(arrivals=[entry])
        together.batch(arrivals=[entry])
    assert (apart.scheduler.gpu_count, together.scheduler.gpu_count) == (2, 1)


def test_the_nearer_of_two_gpus_is_taken_where_distance_counts():
    """Machines of four GPUs; what leaves GPU 4 stays on its machine though it fits more tightly elsewhere."""

    def distance(first, second):
        return float(first // 4 != second // 4)

    near = mell.Settings(slack=0, consolidate=False, weights=mell.Weights(1.0, 0.0, 10.0), distance=distance)
    taken = []
    for chosen in (mell.Settings(slack=0, consolidate=False), near):
        scheduler = mell.Mell(1000, chosen)
        for number, sizes in {1: [199, 199, 199, 198], 4: [200] * 5, 5: [193, 193, 192, 192]}.items():
            for part, size in enumerate(sizes):
                scheduler._fleet.put((number, part), size, number)
        scheduler.audit()
        taken.append(scheduler.grow((4, 0), 210).moves[0].destination)
    assert taken == [1, 5]


def test_the_slack_is_a_fortieth_of_a_gpu_unless_it_is_given():
    plans = []
    for chosen in (None, mell.Settings(), mell.Settings(slack=25), mell.Settings(slack=0)):
        driver = Driver(capacity=1000, settings=chosen)
        rng = random.Random(3)
        driver.batch(arrivals=[(number, rng.randint(20, 250)) for number in range(60)])
        made = []
        for _ in range(20):
            grown = [(number, min(size + 5, 1000)) for number, size in driver.scheduler.sizes.items()]
            made.append(driver.batch(growths=grown))
        plans.append(made)
    assert plans[0] == plans[1] == plans[2] != plans[3]
    assert mell.Settings().slack_of(1039) == 25


def test_slack_saves_moves():
    counts = {}
    for slack in (0, 40):
        driver = Driver(capacity=1000, settings=mell.Settings(slack=slack))
        rng = random.Random(3)
        driver.batch(arrivals=[(number, rng.randint(20, 250)) for number in range(60)])
        moves = 0
        for _ in range(20):
            grown = [(number, min(size + 5, 1000)) for number, size in driver.scheduler.sizes.items()]
            moves += driver.batch(growths=grown).item_moves
        counts[slack] = moves
    assert counts[40] < counts[0]


def test_a_gpu_that_is_emptied_stops_and_its_number_is_used_again():
    driver = Driver()
    driver.batch(arrivals=[("a", C), ("b", C)])
    plan = driver.batch(departures=["a"])
    assert plan.terminated == (0,)
    assert driver.batch(arrivals=[("c", C)]).activated == (0,)


# ---- refusals


@pytest.mark.parametrize(
    "call",
    [
        lambda scheduler: scheduler.allocate("new", C + 1),
        lambda scheduler: scheduler.allocate("new", 0),
        lambda scheduler: scheduler.allocate("there", 5),
        lambda scheduler: scheduler.grow("there", C + 1),
        lambda scheduler: scheduler.grow("there", 9),
        lambda scheduler: scheduler.grow("nobody", 9),
        lambda scheduler: scheduler.depart("nobody"),
        lambda scheduler: scheduler.batch(departures=["there"], growths=[("there", 20)]),
        lambda scheduler: scheduler.batch(departures=["there", "there"]),
        lambda scheduler: scheduler.batch(arrivals=[("new", 5), ("new", 5)]),
        lambda scheduler: scheduler.batch(arrivals=[("new", 5), ("newer", C + 1)]),
    ],
)
def test_impossible_changes_are_refused_without_effect(call):
    scheduler = mell.Mell(C)
    scheduler.allocate("there", 10)
    with pytest.raises(ArgumentError):
        call(scheduler)
    assert dict(scheduler.sizes) == {"there": 10}
    scheduler.audit()


def test_useless_schedulers_are_refused():
    with pytest.raises(ArgumentError, match="capacity"):
        mell.Mell(7)
    for name, value in (("slack", C // 4 + 1), ("slack", -1), ("reserve", -1), ("candidates", 0), ("candidates", -3)):
        with pytest.raises(ArgumentError, match=f"{name}.*{value}|{value}.*{name}"):
            mell.Mell(C, mell.Settings(**{name: value}))
    for name in ("slack", "reserve", "candidates"):
        with pytest.raises(ArgumentTypeError, match=name):
            mell.Mell(C, mell.Settings(**{name: 5.5}))
    with pytest.raises(ArgumentTypeError, match="capacity"):
        mell.Mell(float(C))


@pytest.mark.parametrize("size", [55.5, float("nan"), "55", None, True])
def test_a_size_that_is_no_int_is_refused_and_changes_nothing(size):
    scheduler = mell.Mell(100)
    scheduler.batch(arrivals=[("a", 50), ("b", 30), ("c", 70)])
    before = {request: (scheduler.where(request), scheduler.sizes[request]) for request in "abc"}
    for call in (
        lambda: scheduler.grow("a", size),
        lambda: scheduler.allocate("d", size),
        lambda: scheduler.batch(["a"], [("c", 71)], [("z", 20), ("y", size)]),
        lambda: scheduler.batch(["b"], [("c", 71), ("a", size)]),
    ):
        with pytest.raises(ArgumentTypeError, match="must be an int"):
            call()
    assert {request: (scheduler.where(request), size) for request, size in scheduler.sizes.items()} == before
    scheduler.audit()


def test_sizes_may_be_numpy_integers():
    """Its shifts and sums are of 64 bits, those of keys have 512."""
    other = mell.Mell(np.int64(1000), mell.Settings(slack=np.int32(7)))
    of_numpy = [(number, np.int64(10 + 97 * number)) for number in range(10)]
    assert other.batch(arrivals=of_numpy).placed == [
        mell.Place(number, other.where(number), 10 + 97 * number) for number in range(10)
    ]
    other.batch(departures=[9], growths=[(0, np.uint16(500))])
    other.audit()
    assert all(type(size) is int for size in [*other.sizes.values(), *other.gpus.values()])


def test_the_audit_finds_a_broken_property():
    scheduler = mell.Mell(C)
    for number in range(2):
        scheduler._fleet.put(("mid", number), C // 2, number)
    with pytest.raises(AuditError, match="property 1"):
        scheduler.audit()


def test_roles_are_the_largest_class():
    scheduler = mell.Mell(C)
    scheduler.allocate("large", C)
    scheduler.allocate("mid", C // 2)
    assert [scheduler.role(gpu) for gpu in sorted(scheduler.gpus)] == [Class.L, Class.M]
    assert mell.class_of(C // 8, C) is Class.SMALL
