"""The core's plan of an eviction is that of policy.quotas, which is easier to read and has the proof."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import _core
from kvpool.errors import ArgumentError, OutOfQuota
from kvpool.policy import multiplexing as mux


@st.composite
def tiers(draw: Any, models: int) -> mux.Tier:
    capacity = draw(st.integers(1, 60))
    unused = capacity
    rules, uses, quotas = {}, {}, {}
    for name in map(str, range(models)):
        active = draw(st.integers(0, unused // 2))
        historical = draw(st.integers(0, unused - active))
        unused -= active + historical
        reserve = draw(st.integers(0, capacity // models))
        rules[name] = mux.QuotaRule(reserve, draw(st.none() | st.integers(max(1, reserve), 70)))
        uses[name] = mux.Use(active, historical)
        quotas[name] = draw(st.integers(0, capacity // 2) | st.integers(0, 70))
    try:
        return mux.Tier(capacity, rules, uses, quotas)
    except OutOfQuota:  # what is active and what is reserved do not fit together
        return mux.Tier(capacity, {name: mux.QuotaRule(0, rule.limit) for name, rule in rules.items()}, uses, quotas)


def numbers(tier: mux.Tier | None) -> Any:
    if tier is None:
        return None
    models = [
        (rule.reserve, rule.limit_of(tier.capacity), tier.quota(name), *tier.uses[name])
        for name, rule in tier.rules.items()
    ]
    return tier.capacity, models


@settings(max_examples=1000)
@given(st.data())
def test_the_core_plans_as_the_policy_does(data):
    models = data.draw(st.integers(1, 6))
    hbm = data.draw(tiers(models))
    dram = data.draw(st.none() | tiers(models))
    model = data.draw(st.integers(0, models - 1))
    admitted = hbm.most(str(model)) - hbm.uses[str(model)].active  # or fewer
    units = data.draw(st.integers(0, max(0, admitted)) | st.integers(0, 70))
    plan = _core._plan_room(numbers(hbm), model, units, numbers(dram))
    try:
        wanted = mux.reclaim(hbm, str(model), units, dram)
    except OutOfQuota:
        assert plan is None
        return
    assert plan is not None
    free, evictions = plan
    found = [(str(of), gone, swapped) for of, gone, swapped in evictions]
    assert (free, found) == (wanted.free, [tuple(each) for each in wanted.evictions])


def test_a_plan_for_more_models_than_a_space_has_is_refused():
    with pytest.raises(ArgumentError, match="at most 16"):
        _core._plan_room((1, [(0, 0, 0, 0, 0)] * 17), 0, 1)
    with pytest.raises(ArgumentError, match="no such model"):
        _core._plan_room((1, []), 99, 1)
