"""The border between live migration and borrowing, as `bench/run.py dist-border` draws it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench.distattention.border import border, borrowing_s, hidden_from, migration_s
from kvpool.sim.lending_study import SETTINGS, machines

PAIR = machines(SETTINGS[0], "lending")


def test_what_borrowing_costs_only_grows_and_is_more_over_a_slower_link():
    near, far = (borrowing_s(PAIR, link, 1024, 300) for link in (PAIR.near, PAIR.far))
    assert 0 < near[0] < near[-1]
    assert near == sorted(near)
    assert all(mine < theirs for mine, theirs in zip(near, far, strict=True))


def test_round_trips_are_hidden_from_a_context_on_and_not_before():
    for link in (PAIR.near, PAIR.far):
        from_there_on = hidden_from(PAIR, link)
        assert borrowing_s(PAIR, link, from_there_on, 1) == [0.0]
        assert borrowing_s(PAIR, link, from_there_on - 1, 1)[0] > 0
    assert hidden_from(PAIR, PAIR.near) < hidden_from(PAIR, PAIR.far)


def test_migration_costs_a_stop_that_hardly_grows_and_a_copy_that_grows_with_the_context():
    (short_stop, short_copy), (long_stop, long_copy) = (migration_s(PAIR, tokens) for tokens in (1024, 65536))
    assert long_copy / short_copy == pytest.approx(64, rel=0.1)
    assert long_stop / short_stop < 8  # by its steps alone
    assert long_stop < long_copy


def test_the_border_is_the_first_token_behind_which_borrowing_has_cost_more():
    lost = [1.0, 2.0, 3.0, 4.0]
    assert [border(lost, cost_s) for cost_s in (0.5, 1.0, 2.5, 4.0)] == [1, 2, 3, 4]
    stop_s, copy_s = migration_s(PAIR, 1024)
    near = borrowing_s(PAIR, PAIR.near, 1024, 1000)
    assert 1 < border(near, stop_s) < border(near, stop_s + copy_s) < 1000
