"""Bounds, classes and groups."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from mell_kit import CAPACITY, optimum, sizes

from kvpool.policy import mell
from kvpool.policy.mell.classes import groups_at_most

C = CAPACITY


@given(st.lists(sizes(), max_size=9))
def test_the_lower_bound_is_never_too_high(drawn):
    assert mell.lower_bound(drawn, C) <= optimum(drawn, C)


@given(st.lists(sizes(), max_size=9))
def test_the_lower_bound_is_at_least_the_obvious_bounds(drawn):
    bound = mell.lower_bound(drawn, C)
    assert bound >= -(-sum(drawn) // C)
    assert bound >= sum(2 * size > C for size in drawn)


def test_the_lower_bound_sees_more_than_a_sum():
    assert mell.lower_bound([], C) == 0
    assert mell.lower_bound([C // 2 + 1] * 5, C) == 5
    assert mell.lower_bound([150, 150, 100, 100, 100], C) == 4  # beside each 150 only 90 is free
    assert sum([150, 150, 100, 100, 100]) < 3 * C


@given(st.integers(8, 10**6), st.data())
def test_classes_are_exact(capacity, data):
    size = data.draw(st.integers(1, capacity))
    part = Fraction(size, capacity)
    bounds = [Fraction(1, 8), Fraction(1, 4), Fraction(1, 3), Fraction(1, 2)]
    assert mell.class_of(size, capacity) == sum(part > bound for bound in bounds)


@given(st.lists(st.integers(1, C // 8), max_size=40))
def test_the_number_of_groups_is_within_its_bound(drawn):
    """Filled one after the other with the largest first, none above C/4."""
    groups: list[int] = []
    for size in sorted(drawn, reverse=True):
        if not groups or groups[-1] + size > C // 4:
            groups.append(0)
        groups[-1] += size
    assert len(groups) <= groups_at_most(sum(drawn), C)
