"""Where the blocks of a long prompt go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError
from kvpool.policy.lending import Away, plan_prefill


def test_a_prompt_that_fits_stays():
    plan = plan_prefill(100, 100, {7: 50}, chunk=4)
    assert (plan.away, plan.home, plan.staging, plan.missing) == ((), 100, 0, 0)


def test_early_leaves_and_the_tail_stay_and_what_lies_between_goes():
    plan = plan_prefill(30, 20, {7: 100}, chunk=2, leaf=4, tail=4)
    # 26 blocks and more of the tail's leaf stay, two chunks are staged, and of the other 14 two leaves fit.
    assert plan.away == (Away(8, 16, 7),)
    assert (plan.home, plan.staging, plan.missing) == (14, 4, 0)


def test_the_fewest_creditors_get_whole_leaves():
    plan = plan_prefill(30, 20, {3: 6, 5: 13, 8: 3}, chunk=2, leaf=4, tail=4)
    assert plan.away == (Away(8, 12, 5), Away(20, 4, 3))


def test_leaves_are_cut_into_aligned_groups_only_where_no_creditor_has_room_for_one():
    plan = plan_prefill(30, 20, {3: 6, 5: 7, 8: 3}, chunk=2, leaf=4, tail=4)
    assert plan.away == (
        Away(8, 4, 5),
        Away(12, 4, 3),
        Away(16, 2, 5),
        Away(18, 2, 8),
        Away(20, 2, 3),
        Away(22, 1, 5),
        Away(23, 1, 8),
    )
    assert plan.missing == 0


@pytest.mark.parametrize(
    ("free", "room", "missing"),
    [
        (20, {7: 12}, 4),  # the creditors have too little
        (20, {}, 16),
        (9, {7: 100}, 1),  # the tail and the chunks do not fit
        (0, {7: 100}, 10),
    ],
)
def test_what_does_not_fit_is_counted(free, room, missing):
    assert plan_prefill(30, free, room, chunk=2, leaf=4, tail=4).missing == missing


@given(
    blocks=st.integers(1, 200),
    free=st.integers(0, 220),
    room=st.dictionaries(st.integers(1, 9), st.integers(0, 90), max_size=5),
    chunk=st.integers(1, 9),
    leaf=st.sampled_from([1, 2, 4, 8, 16]),
    tail=st.integers(1, 20),
)
def test_every_block_has_one_place_that_has_room(blocks, free, room, chunk, leaf, tail):
    plan = plan_prefill(blocks, free, room, chunk, leaf, tail)
    given_out = dict.fromkeys(room, 0)
    before = 0
    for part in plan.away:
        assert part.blocks > 0
        assert before <= part.first
        before = part.first + part.blocks
        given_out[part.creditor] += part.blocks
    assert before <= max(0, blocks - tail)
    assert all(given_out[creditor] <= room[creditor] for creditor in room)
    if plan.missing:
        first_kept = free - plan.staging - tail - leaf  # at least so many could stay, with the tail and its leaf's rest
        assert first_kept < 0 or sum(room.values()) < blocks - tail - first_kept // leaf * leaf
    else:
        assert plan.home + plan.staging <= free
        if plan.away:
            assert plan.away[0].first % leaf == before % leaf == 0
            assert before - plan.away[0].first == sum(part.blocks for part in plan.away)  # without a gap
            assert plan.home + plan.staging > free - leaf  # no further leaf could have stayed
        # A leaf is cut only where every creditor that is left has less room than one.
        left = dict(room)
        for part in plan.away:
            if part.first % leaf == 0 and part.blocks < leaf:
                assert max(left.values()) < leaf
            left[part.creditor] -= part.blocks


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": 0},
        {"free": -1},
        {"chunk": 0},
        {"leaf": 3},
        {"leaf": 0},
        {"tail": 0},
        {"room": {1: -1}},
        {"free": 1.5},
    ],
)
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ArgumentError):
        plan_prefill(**({"blocks": 10, "free": 4, "room": {1: 10}, "chunk": 1, "leaf": 2, "tail": 2} | wrong))
