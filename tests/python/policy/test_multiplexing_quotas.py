"""Quotas of many models in one space: water-filling against unit by unit, how quotas adapt, and what is fair."""

from __future__ import annotations

from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import ArgumentError, ArgumentTypeError
from kvpool.policy import multiplexing as mux
from kvpool.policy.multiplexing import QuotaRule, Seen, Tier, Use


@st.composite
def fillings(draw):
    """total, slopes, lows, highs, as level_fill requires them."""
    many = draw(st.integers(1, 5))
    slopes = [draw(st.sampled_from([0.25, 1.0, 1.5, 3.0, 40.0])) for _ in range(many)]
    lows = [draw(st.integers(0, 9)) for _ in range(many)]
    highs = [low + draw(st.integers(0, 30)) for low in lows]
    return sum(lows) + draw(st.integers(0, 80)), slopes, lows, highs


def unit_by_unit(total, slopes, lows, highs):
    """The oracle: each unit to the model that then has the least for its slope."""
    found = list(lows)
    for _ in range(total - sum(lows)):
        open_ = [at for at in range(len(found)) if found[at] < highs[at]]
        if not open_:
            break
        found[min(open_, key=lambda at: ((found[at] + 1) / slopes[at], at))] += 1
    return found


@settings(max_examples=200)
@given(fillings())
def test_water_filling_is_what_handing_out_unit_by_unit_gives(filling):
    found, oracle = mux.level_fill(*filling), unit_by_unit(*filling)
    _, slopes, lows, highs = filling
    assert sum(found) == sum(oracle)
    assert all(low <= units <= high for low, units, high in zip(lows, found, highs, strict=True))
    for i, more in enumerate(found):
        for j, less in enumerate(found):
            if more < highs[i] and less > lows[j]:
                assert (more + 1) / slopes[i] >= less / slopes[j] * (1 - 1e-9)
    assert sorted(found[at] / slopes[at] for at in range(len(found))) == pytest.approx(
        sorted(oracle[at] / slopes[at] for at in range(len(found))), abs=1 / min(slopes)
    )


def every_division(total, lows, highs):
    if not lows:
        yield []
        return
    for units in range(lows[0], min(highs[0], total) + 1):
        for rest in every_division(total - units, lows[1:], highs[1:]):
            yield [units, *rest]


@settings(max_examples=60)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=3))
def test_no_division_gives_the_poorest_model_more(more, marks):
    """Brute force over all integer divisions, equal slopes: the sorted units are the largest there are."""
    lows = [low for low, _ in marks]
    highs = [low + room for low, room in marks]
    total = min(sum(lows) + more, sum(highs))
    found = mux.level_fill(total, [1.0] * len(lows), lows, highs)
    best = max(sorted(each) for each in every_division(total, lows, highs) if sum(each) == total)
    assert sorted(found) == best


RULES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        lambda reserve, room, weight: QuotaRule(reserve, None if room is None else reserve + room, weight),
        st.integers(0, 20),
        st.none() | st.integers(1, 60),
        st.sampled_from([0.1, 1.0, 7.0]),
    ),
    min_size=1,
)
DEMANDS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e12), max_size=6)


@settings(max_examples=150)
@given(RULES, DEMANDS, st.integers(120, 300))
def test_targets_use_the_capacity_within_reserves_and_limits(rules, demands, capacity):
    demands = {model: demand for model, demand in demands.items() if model in rules}
    found = mux.targets(capacity, rules, demands)
    assert list(found) == list(rules)
    assert sum(found.values()) == min(capacity, sum(rule.limit_of(capacity) for rule in rules.values()))
    assert all(rules[model].reserve <= units <= rules[model].limit_of(capacity) for model, units in found.items())


def test_scarce_memory_is_shared_by_weight_and_demand_and_the_rest_by_weight():
    rules = {"a": QuotaRule(), "b": QuotaRule(), "c": QuotaRule(weight=2.0), "idle": QuotaRule(reserve=50)}
    found = mux.targets(450, rules, {"a": 200.0, "b": 800.0, "c": 500.0})
    assert found == {"a": 40, "b": 160, "c": 200, "idle": 50}  # a level of 1/5 of weight times demand
    plenty = mux.targets(5000, {"a": QuotaRule(), "b": QuotaRule(weight=3.0)}, {"a": 1000.0, "b": 0.0})
    assert plenty == {"a": 2000, "b": 3000}


def test_a_demand_is_rate_times_tokens_times_units():
    assert mux.demand(2.0, 499, 8) == 2.0 * 499 * 8
    assert mux.demand(0, 499, 8) == 0.0
    assert mux.demand(2.0, 499, 0.5, seconds=30) == 2.0 * 499 * 0.5 * 30


# ---- adaptation


def test_quotas_follow_use_and_backlog_and_keep_still_for_little():
    rules = {"a": QuotaRule(reserve=10), "b": QuotaRule()}
    first = mux.first_quotas(1000, rules, {"a": 500.0, "b": 1500.0})
    assert first.units == {"a": 250, "b": 750}
    still = mux.adapt(first, 1000, rules, {"a": Seen(500), "b": Seen(1490)}, 10.0)
    assert still.units == first.units
    moved = mux.adapt(first, 1000, rules, {"a": Seen(200, 1300), "b": Seen(300)}, 10.0)  # half: 350 + 650, 900
    assert moved.units == {"a": 526, "b": 474}
    assert moved.trends["a"] == (350.0, 650.0)
    idle = mux.adapt(moved, 1000, rules, {}, 1e9)
    assert idle.units == moved.units


def test_models_that_all_need_more_share_by_their_rates_however_long_their_backlogs_have_grown():
    """Found by a simulation: overloaded, a model got more memory the longer its queue was, and fairness was lost."""
    rules = {name: QuotaRule() for name in "abc"}
    demands = {"a": 3.0, "b": 1.0, "c": 4.0}
    last = mux.first_quotas(800, rules, demands)
    seen = {"a": Seen(300, 5000), "b": Seen(100, 90_000), "c": Seen(10, 0)}
    found = mux.adapt(last, 800, rules, seen, 1e9, None, demands)
    assert found.units == {"a": 593, "b": 197, "c": 10}  # c needs no more; the others as 3 to 1
    assert mux.adapt(last, 800, rules, seen, 1e9).units["b"] > 700
    for wrong in ({"d": 1.0}, {"a": -1.0}, {"a": nan}):
        with pytest.raises(ArgumentError):
            mux.adapt(last, 800, rules, seen, 1.0, None, wrong)


def test_small_models_among_32_get_their_quotas():
    rules = {f"m{at}": QuotaRule() for at in range(32)}
    large = {"m0": Seen(50_000), "m1": Seen(50_000)}
    quotas = mux.first_quotas(100_000, rules, {"m0": 1.0, "m1": 1.0} | dict.fromkeys(list(rules)[2:], 0.0))
    quotas = mux.adapt(quotas, 100_000, rules, large, 1e4)
    assert quotas.units["m7"] == 0
    small = large | {name: Seen(0, 300) for name in list(rules)[2:]}
    for _ in range(10):
        quotas = mux.adapt(quotas, 100_000, rules, small, 10.0)
    assert quotas.units["m7"] == pytest.approx(300 * 100_000 / 109_000, rel=0.15)


def test_quotas_stay_when_all_have_been_idle_for_long():
    rules, exact = {"a": QuotaRule(), "b": QuotaRule()}, mux.Adaptation(band=0.0)
    busy = mux.adapt(mux.first_quotas(1000, rules, {"a": 1.0, "b": 1.0}), 1000, rules, {"a": Seen(900)}, 1e4, exact)
    assert busy.units["a"] > 900
    assert mux.adapt(busy, 1000, rules, {}, 200.0, exact).units == busy.units  # 20 half-lives: 0.001 units


def test_quotas_never_drift_however_often_they_change():
    rules = {name: QuotaRule(reserve=3, limit=500) for name in "abcdefg"}
    quotas = mux.first_quotas(997, rules, dict.fromkeys(rules, 1.0))
    dice = Random(5)
    for _ in range(400):
        seen = {name: Seen(dice.randrange(300), dice.randrange(300)) for name in rules}
        quotas = mux.adapt(quotas, 997, rules, seen, 1.0)
        assert sum(quotas.units.values()) == 997


def test_a_limit_that_is_raised_again_lets_its_model_grow_at_once():
    wide, narrow = {"a": QuotaRule(), "b": QuotaRule()}, {"a": QuotaRule(limit=100), "b": QuotaRule()}
    seen = {"a": Seen(100, 900), "b": Seen(100)}
    quotas = mux.adapt(mux.first_quotas(1000, wide, {"a": 1000.0, "b": 100.0}), 1000, wide, seen, 1.0)
    before = quotas.units["a"]
    quotas = mux.adapt(quotas, 1000, narrow, seen, 0.0)
    assert quotas.units["a"] == 100
    coarse = mux.Adaptation(band=0.99)  # that would hold everything
    assert mux.adapt(quotas, 1000, wide, seen, 0.0, coarse).units["a"] == before > 800


def test_models_that_come_and_go_change_the_quotas_at_once():
    rules = {"a": QuotaRule(), "b": QuotaRule()}
    quotas = mux.first_quotas(100, rules, {"a": 100.0, "b": 100.0})
    alone = mux.adapt(quotas, 100, {"a": QuotaRule()}, {"a": Seen(50)}, 0.0)
    assert alone.units == {"a": 100}
    back = mux.adapt(alone, 100, rules, {"a": Seen(100), "b": Seen(0, 100)}, 0.0)
    assert back.units == {"a": 50, "b": 50}


# ---- fairness


def test_fairness_is_over_models_that_wait_only():
    uses = {"a": Use(50), "b": Use(52), "idle": Use(0, 400)}
    demands = {"a": 100.0, "b": 100.0, "idle": 100.0}
    assert mux.fairness(uses, demands, {"a", "b"}) == (pytest.approx(4 / 102), True, "a", "b")
    assert mux.fairness(uses, demands, {"a", "b", "idle"}) == (pytest.approx(3 * 52 / 102), False, "idle", "b")
    assert mux.fairness(uses, demands, {"a"}) == (0.0, True, "a", "a")
    assert mux.fairness(uses, demands, set()) == (0.0, True, "", "")
    assert mux.fairness(uses, demands, {"a", "b"}, weights={"b": 2.0}) == (pytest.approx(72 / 102), False, "b", "a")


def test_fairness_does_not_depend_on_the_scale_of_demands_or_weights():
    uses = {"a": Use(10), "b": Use(60), "c": Use(0)}
    for scale in (1e-6, 1.0, 1e6):
        demands = {"a": 100.0 * scale, "b": 100.0 * scale}
        found = mux.fairness(uses, demands, {"a", "b"}, {"a": scale, "b": scale})
        assert found == (pytest.approx(100 / 70), False, "a", "b")
    assert mux.fairness(uses, {"a": 1e-3, "b": 6e-3}, {"a", "b"}).fair
    assert mux.fairness({"a": Use(), "b": Use()}, {"a": 1.0, "b": 9.0}, {"a", "b"}) == (0.0, True, "a", "a")


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(200, 5000), st.sampled_from([0.5, 1.0, 4.0])), min_size=2, max_size=6))
def test_models_that_use_scarce_quotas_fully_are_fair(entries):
    rules = {str(at): QuotaRule(weight=weight) for at, (_, weight) in enumerate(entries)}
    demands = {str(at): 1000.0 * needed for at, (needed, _) in enumerate(entries)}
    found = mux.targets(100_000, rules, demands)
    uses = {model: Use(units) for model, units in found.items()}
    weights = {model: rule.weight for model, rule in rules.items()}
    assert mux.fairness(uses, demands, set(rules), weights).fair


# ---- bad input


@pytest.mark.parametrize("weight", [0, 0.0, -1.0, nan, inf])
def test_a_weight_is_a_finite_number_above_0(weight):
    with pytest.raises(ArgumentError, match="weight"):
        QuotaRule(weight=weight)


FIRST = mux.first_quotas(100, {"a": QuotaRule()}, {"a": 1.0})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: QuotaRule(reserve=10, limit=9), "reserve 10 is above limit 9"),
        (lambda: QuotaRule(reserve=-1), "reserve is -1"),
        (lambda: Tier(10, {"a": QuotaRule(6), "b": QuotaRule(5)}), "reserves are 11"),
        (lambda: Tier(0, {}), "capacity"),
        (lambda: Tier(10, {}, {"a": Use(1)}), "'a'"),
        (lambda: Tier(10, {"a": QuotaRule()}, {"a": Use(-1)}), "active"),
        (lambda: Tier(10, {"a": QuotaRule()}, quotas={"b": 1}), "'b'"),
        (lambda: mux.admit(Tier(10, {"a": QuotaRule()}), "b", 1), "'b'"),
        (lambda: mux.reclaim(Tier(10, {"a": QuotaRule()}), "a", -1), "units is -1"),
        (lambda: mux.targets(10, {"a": QuotaRule()}, {"b": 1.0}), "'b'"),
        (lambda: mux.targets(10, {"a": QuotaRule()}, {"a": nan}), "demand"),
        (lambda: mux.first_quotas(10, {"a": QuotaRule()}, {"a": 0.0}), "rates are 0"),
        (lambda: mux.demand(nan, 1, 1), "rate"),
        (lambda: mux.demand(1, 0, 1), "tokens"),
        (lambda: mux.demand(1e300, 1e300, 1), "demand"),
        (lambda: mux.demand(10**400, 1, 1), "rate"),
        (lambda: mux.targets(10, {"a": QuotaRule(6), "b": QuotaRule(5)}, {}), "reserves are 11"),
        (lambda: mux.first_quotas(10, {"a": QuotaRule(11)}, {"a": 1.0}), "reserves are 11"),
        (lambda: mux.adapt(FIRST, 100, {"a": QuotaRule(101)}, {}, 1.0), "reserves are 101"),
        (lambda: mux.adapt(FIRST, 0, {"a": QuotaRule()}, {}, 1.0), "capacity"),
        (lambda: mux.adapt(FIRST, -5, {"a": QuotaRule()}, {"a": Seen(1)}, 1.0), "capacity"),
        (lambda: mux.Adaptation(half_life_s=0), "half_life_s"),
        (lambda: mux.Adaptation(band=1.0), "band"),
        (lambda: mux.fairness({"a": Use()}, {"a": 0.0}, {"a"}), "demand"),
        (lambda: mux.fairness({"a": Use()}, {"a": 1.0}, {"b"}), "'b'"),
        (lambda: mux.fairness({}, {}, set(), epsilon=0), "epsilon"),
        (lambda: mux.fairness({"a": Use()}, {"a": 1.0}, {"a"}, weights={"a": nan}), "weight"),
        (lambda: Tier(10, {"a": QuotaRule()}).without("b"), "'b'"),
        (lambda: Tier(10, {"a": QuotaRule(5)}).with_rule("b", QuotaRule(6)), "exceeds the capacity"),
    ],
)
def test_bad_values_are_refused(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


def test_values_do_not_change_with_the_dicts_that_they_were_made_from():
    rules, uses, units = {"a": QuotaRule(5)}, {"a": Use(1)}, {"a": 50}
    tier, quotas = Tier(50, rules, uses, units), mux.first_quotas(50, rules, {"a": 1.0})
    rules["a"] = QuotaRule(60)
    rules["b"] = QuotaRule()
    uses["a"], units["a"] = Use(70), 70
    assert (tier.committed, tier.quota("a"), list(tier.rules), list(quotas.rules)) == (5, 50, ["a"], ["a"])
    adapted = mux.adapt(quotas, 50, changed := {"a": QuotaRule(9)}, {}, 1.0)
    changed["a"] = QuotaRule(10)
    assert adapted.rules == {"a": QuotaRule(9)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: QuotaRule(reserve=1.5),
        lambda: QuotaRule(weight="1"),
        lambda: QuotaRule(limit=True),
        lambda: mux.adapt(FIRST, nan, {"a": QuotaRule()}, {}, 1.0),
        lambda: mux.adapt(FIRST, 1e3, {"a": QuotaRule()}, {}, 1.0),
    ],
)
def test_wrong_types_are_refused(make):
    with pytest.raises(ArgumentTypeError):
        make()
