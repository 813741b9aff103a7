"""Room for models in one space: whose cache makes it, which reserves are kept, and long churn against the proof."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import OutOfBlocks, OutOfQuota
from kvpool.policy import multiplexing as mux
from kvpool.policy.multiplexing import QuotaRule, Seen, Tier, Use


def grown(tier, model, units, dram=None):
    """Carries out what reclaim says, checking each promise; OutOfQuota changes nothing."""
    room = mux.reclaim(tier, model, units, dram)
    uses = dict(tier.uses)
    for eviction in room.evictions:
        before = uses[eviction.model]
        after = Use(before.active, before.historical - eviction.units)
        assert 0 <= eviction.swapped <= eviction.units <= before.historical
        if eviction.model != model:
            assert sum(after) >= tier.rules[eviction.model].reserve
        uses[eviction.model] = after
    assert room.free <= max(0, tier.free)
    assert room.free + sum(each.units for each in room.evictions) >= units
    uses[model] = Use(uses[model].active + units, uses[model].historical)
    after = Tier(tier.capacity, tier.rules, uses, tier.quotas)
    assert sum(uses[model]) <= max(tier.rules[model].limit_of(tier.capacity), uses[model].active)
    return after


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_long_churn_never_breaks_the_invariant_and_a_reserve_is_always_to_be_had(seed):
    dice = Random(seed)
    models = "abcd"
    rules = {model: QuotaRule(dice.randrange(0, 50), dice.choice([None, 90, 150])) for model in models}
    tier = Tier(200, rules)
    quotas = mux.first_quotas(200, rules, dict.fromkeys(models, 60.0))
    for step in range(120):
        model = dice.choice(models)
        use = tier.uses[model]
        what = dice.randrange(5)
        if what <= 1:
            units = dice.randrange(1, 60)
            active = use.active + units
            others = sum(max(tier.uses[o].active, rules[o].reserve) for o in models if o != model)
            if active > rules[model].limit_of(200) or others + max(active, rules[model].reserve) > 200:
                with pytest.raises(OutOfQuota) as caught:
                    grown(tier, model, units)
                error = caught.value
                assert (error.requested, error.model, error.free) == (units, model, tier.free)
            else:
                tier = grown(tier, model, units)
        elif what == 2:
            done = dice.randint(0, use.active)
            tier = tier.with_use(model, Use(use.active - done, use.historical + done))
        elif what == 3:
            tier = tier.with_use(model, Use(use.active, dice.randint(0, use.historical)))
        else:
            seen = {name: Seen(tier.uses[name].active, dice.choice([0, 0, 80])) for name in models}
            quotas = mux.adapt(quotas, 200, rules, seen, dice.choice([0.1, 5.0, 60.0]))
            assert sum(quotas.units.values()) == min(200, sum(rule.limit_of(200) for rule in rules.values()))
            tier = Tier(200, rules, tier.uses, quotas.units)
        assert tier.committed <= 200
        assert tier.free >= 0
        if step % 10 == 0:
            for name in models:
                lacking = rules[name].reserve - tier.uses[name].active
                if lacking > 0:
                    grown(tier, name, lacking)


def test_the_neighbour_furthest_beyond_its_quota_gives_first():
    rules = dict.fromkeys("abcd", QuotaRule(reserve=5))
    uses = {"a": Use(0, 0), "b": Use(0, 40), "c": Use(0, 30), "d": Use(10, 20)}
    tier = Tier(100, rules, uses, {"a": 25, "b": 20, "c": 25, "d": 30})
    assert mux.reclaim(tier, "a", 10).evictions == (mux.Eviction("b", 10, 0),)
    assert mux.reclaim(tier, "a", 21).evictions == (mux.Eviction("b", 18, 0), mux.Eviction("c", 3, 0))
    within = mux.reclaim(tier, "a", 28).evictions  # 20 and 5 beyond, then each gives one of what is within
    assert {each.model: each.units for each in within} == {"b": 21, "c": 6, "d": 1}


def test_free_units_come_first_and_own_cache_before_neighbours_within_their_quota():
    rules = dict.fromkeys("ab", QuotaRule())
    tier = Tier(100, rules, {"a": Use(10, 30), "b": Use(0, 50)}, {"a": 50, "b": 50})
    assert mux.reclaim(tier, "a", 10) == (10, ())
    assert mux.reclaim(tier, "a", 30) == (10, (mux.Eviction("a", 20, 0),))
    assert mux.reclaim(tier, "a", 45) == (10, (mux.Eviction("a", 30, 0), mux.Eviction("b", 5, 0)))
    assert mux.reclaim(tier, "a", 90) == (10, (mux.Eviction("a", 30, 0), mux.Eviction("b", 50, 0)))
    with pytest.raises(OutOfQuota, match="10 active and 30 historical"):
        mux.reclaim(tier, "a", 91)


def test_a_reserve_is_never_evicted_by_a_neighbour():
    rules = {"a": QuotaRule(), "b": QuotaRule(reserve=40)}
    tier = Tier(100, rules, {"b": Use(10, 60)}, {"a": 100, "b": 0})
    assert mux.reclaim(tier, "a", 60) == (30, (mux.Eviction("b", 30, 0),))
    with pytest.raises(OutOfQuota):
        mux.reclaim(tier, "a", 61)
    full = grown(tier, "a", 60)
    assert full.uses == {"a": Use(60, 0), "b": Use(10, 30)}
    grown(full, "b", 30)  # its reserve, by its own cache


def test_a_limit_counts_historical_units_and_own_cache_makes_room_below_it():
    rules = {"a": QuotaRule(limit=50), "b": QuotaRule()}
    tier = Tier(100, rules, {"a": Use(20, 30)})
    assert mux.reclaim(tier, "a", 20) == (0, (mux.Eviction("a", 20, 0),))
    with pytest.raises(OutOfQuota, match="limit of 50") as caught:
        mux.admit(tier, "a", 31)
    assert caught.value.limit == 50
    assert isinstance(caught.value, OutOfBlocks)
    lowest = tier.with_rule("a", QuotaRule(limit=10))
    mux.admit(lowest, "a", 0)  # nothing more: whatever is active may stay
    with pytest.raises(OutOfQuota):
        mux.admit(lowest, "a", 1)
    lowered = tier.with_rule("a", QuotaRule(limit=30))
    assert mux.reclaim(lowered, "a", 5) == (0, (mux.Eviction("a", 25, 0),))  # 20 beyond the new limit go as well


def test_what_is_evicted_goes_to_dram_as_far_as_its_owners_quota_there_allows():
    rules = {"a": QuotaRule(), "b": QuotaRule(), "c": QuotaRule()}
    hbm = Tier(100, rules, {"b": Use(0, 60), "c": Use(0, 40)})
    dram = Tier(50, rules, {"b": Use(0, 10)}, {"a": 0, "b": 25, "c": 20})
    room = mux.reclaim(hbm, "a", 100, dram)
    assert room.evictions == (mux.Eviction("b", 60, 15), mux.Eviction("c", 40, 20))
    tight = Tier(20, rules, {"b": Use(0, 10)}, {"b": 15, "c": 20})
    assert mux.reclaim(hbm, "a", 100, tight).evictions == (mux.Eviction("b", 60, 5), mux.Eviction("c", 40, 5))
    assert mux.reclaim(hbm, "a", 1, Tier(50, {"a": QuotaRule()})).evictions == (mux.Eviction("b", 1, 0),)


@pytest.mark.parametrize("order", ["abcd", "dcba", "cadb"])
def test_who_gives_what_does_not_depend_on_the_order_in_which_models_came(order):
    """b, c and d are equally far beyond their quotas: one keeps the odd unit, and DRAM has room for 15 of theirs."""
    quotas = dict.fromkeys("bcd", 20)
    hbm = Tier(100, {name: QuotaRule() for name in order}, {name: Use(0, 30) for name in order if name != "a"}, quotas)
    dram = Tier(15, {name: QuotaRule() for name in order}, {}, dict.fromkeys("abcd", 8))
    assert mux.reclaim(hbm, "a", 33, dram).evictions == (
        mux.Eviction("b", 7, 7), mux.Eviction("c", 8, 8), mux.Eviction("d", 8, 0)
    )  # fmt: skip


def test_a_reserve_that_does_not_fit_beside_what_runs_is_refused_until_it_ends():
    tier = Tier(100, {"a": QuotaRule()}, {"a": Use(70, 30)})
    with pytest.raises(OutOfQuota):
        tier.with_rule("b", QuotaRule(reserve=31))
    assert tier.rules == {"a": QuotaRule()}
    loaded = tier.with_rule("b", QuotaRule(reserve=30))
    assert mux.reclaim(loaded, "b", 30).evictions == (mux.Eviction("a", 30, 0),)
    assert loaded.without("a").free == 100
    with pytest.raises(OutOfQuota):
        mux.admit(loaded, "a", 1)
