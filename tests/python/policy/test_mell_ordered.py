"""Ordered sets beside plain sorting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.policy.mell.ordered import Ordered


@pytest.mark.parametrize("largest", [1, 511, 512, 17_166, 10**6, 10**9])
@given(data=st.data())
def test_all_items_are_found_in_order(largest, data):
    ordered: Ordered[int] = Ordered(largest)
    there = set()
    keys = st.one_of(st.integers(0, largest), st.sampled_from([0, largest, largest // 2]))
    for key, number in data.draw(st.lists(st.tuples(keys, st.integers(0, 5)), max_size=30)):
        if (key, number) in there:
            there.remove((key, number))
            ordered.remove(key, number)
        else:
            there.add((key, number))
            ordered.add(key, number)
        asked = data.draw(st.integers(-3, largest + 3))
        assert [key for key, _ in ordered.at_least(asked)] == sorted(key for key, _ in there if key >= asked)
        assert [key for key, _ in ordered.at_most(asked)] == sorted((key for key, _ in there if key <= asked))[::-1]
        assert set(ordered.at_least(0)) == there
        assert bool(ordered) == bool(there)


def test_items_under_one_key_come_in_the_order_of_insertion():
    ordered: Ordered[str] = Ordered(100)
    for name in ("b", "a", "c"):
        ordered.add(7, name)
    assert [name for _, name in ordered.at_least(0)] == ["b", "a", "c"]
