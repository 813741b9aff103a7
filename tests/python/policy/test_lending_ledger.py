"""The ledger of debts, what is worth publishing, and which creditors a borrower asks."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.lending_kit import ledger_of, row

from kvpool import DRAM, HBM, ArgumentError
from kvpool.policy import lending


def drawn(ledger, borrower=1, blocks=10, seed=0, **options):
    return lending.candidates(ledger, borrower, blocks, Random(seed), **options)


def test_older_rows_and_rows_of_earlier_terms_are_dropped():
    ledger = ledger_of(row(1, 50, version=3))
    assert not ledger.take(row(1, 60, version=3))
    assert not ledger.take(row(1, 60, version=2))
    assert ledger.take(row(1, 70, term=2, version=0))
    assert not ledger.take(row(1, 60, version=9))
    assert ledger.get(1).free_blocks == 70


@given(st.permutations([(term, version) for term in (1, 2) for version in (0, 1, 2)]))
def test_the_latest_row_stays_in_whatever_order_rows_come(order):
    ledger = lending.Ledger()
    for term, version in [*order, *order]:
        ledger.take(row(1, 10 * term + version, term=term, version=version))
    assert ledger.get(1).free_blocks == 22
    assert ledger.version(1) == (2, 2)


def test_a_member_that_left_comes_back_in_a_later_term_only():
    ledger = ledger_of(row(1), row(2, debts={1: 5}))
    assert ledger.debts() == {(2, 1): 5}
    ledger.leave(1)
    assert ledger.debts() == {}
    assert not ledger.take(row(1, version=99))
    assert 1 not in ledger
    assert ledger.take(row(1, term=2))
    assert ledger.debts() == {(2, 1): 5}
    ledger.leave(9)


def test_a_loss_that_is_told_late_does_not_cost_a_member_its_next_term():
    ledger = ledger_of(row(1, term=2))
    assert not ledger.leave(1, term=1)
    assert ledger.take(row(1, term=2, version=2))
    assert ledger.leave(1, term=2)
    assert 1 not in ledger


def test_a_refusal_corrects_a_row_until_the_next_one():
    ledger = ledger_of(row(1, 100))
    ledger.correct(1, 7)
    assert ledger.lendable(1) == 7
    ledger.correct(1, 50)  # an answer never makes more of a row than it says
    assert ledger.lendable(1) == 7
    assert not ledger.take(row(1, 100))
    assert ledger.lendable(1) == 7
    assert ledger.take(row(1, 100, version=2))
    assert ledger.lendable(1) == 80
    ledger.correct(5, 3)
    assert ledger.lendable(5) == 0


@pytest.mark.parametrize(
    ("changes", "lendable"),
    [
        ({"free": 100}, 80),
        ({"free": 30}, 30),
        ({"free": 30, "dram": 20}, 50),
        ({"free": 100, "lent": 70}, 10),
        ({"free": 100, "lent": 90}, 0),
        ({"free": 100, "debts": {9: 1}}, 0),
    ],
)
def test_what_a_member_may_lend(changes, lendable):
    """Its free blocks of all media, at most up to its cap, and nothing while it borrows."""
    ledger = ledger_of(row(1, **changes))
    assert ledger.lendable(1) == lendable


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"member": 0}, "a member's id"),
        ({"free": -1}, "free"),
        ({"free": 400, "lent": 1}, "400 blocks free and 1 lent, of 400"),
        ({"debts": {1: 3}}, "owes blocks to itself"),
        ({"debts": {2: 0}}, "the debt to 2"),
        ({"host": None}, "host"),
        ({"version": True}, "version"),
    ],
)
def test_a_row_that_no_member_can_be_in_is_refused(changes, text):
    with pytest.raises(ArgumentError, match=text):
        row(**{"member": 1, **changes})


def test_a_row_does_not_change_with_what_it_was_made_of():
    free, debts = {HBM: 5}, {2: 3}
    made = lending.Row(1, 1, 1, "a", 10, free, 5, 0, debts)
    free[DRAM] = 99
    debts.clear()
    assert (made.free_blocks, dict(made.debts)) == (5, {2: 3})


@pytest.mark.parametrize(
    ("changes", "worth"),
    [
        ({}, False),
        ({"free": 119}, False),
        ({"free": 120}, True),
        ({"free": 110, "dram": 10}, True),  # ten here and ten there
        ({"lent": 19}, False),
        ({"lent": 20}, True),
        ({"debts": {9: 25, 8: 9}}, False),
        ({"debts": {9: 30, 8: 10}}, True),
        ({"debts": {}}, True),  # no longer borrows: may lend
        ({"term": 2}, True),
        ({"host": "b"}, True),
        ({"lend_max": 81}, True),
    ],
)
def test_what_is_worth_publishing(changes, worth):
    old = {"member": 1, "free": 100, "debts": {9: 20}}
    assert lending.worth_publishing(row(**old), row(**{**old, "version": 2, **changes})) is worth


def test_the_first_row_and_the_end_of_lending_are_worth_publishing():
    assert lending.worth_publishing(None, row(1))
    assert lending.worth_publishing(row(1, 1), row(1, 0))
    assert not lending.worth_publishing(row(1, 2), row(1, 1))
    assert not lending.worth_publishing(row(1, 2), row(1, 2), part=0)
    with pytest.raises(ArgumentError, match="part"):
        lending.worth_publishing(None, row(1), part=2)


def test_borrowers_those_without_room_and_refused_ones_are_no_candidates():
    ledger = ledger_of(
        row(1),  # the borrower
        row(2, debts={5: 9}),  # borrows
        row(3, lent=71),  # nine short of its cap
        row(4, 9),  # nine free
        row(5),
        row(6),
    )
    for seed in range(20):
        assert set(drawn(ledger, seed=seed)) == {5, 6}
        assert drawn(ledger, seed=seed, without={6}) == (5,)
    ledger.correct(5, 9)
    assert drawn(ledger) == (6,)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30), st.booleans()), min_size=1, max_size=12),
       st.integers(1, 40), st.integers())  # fmt: skip
def test_candidates_may_always_lend_what_is_needed(members, blocks, seed):
    ledger = ledger_of(
        *(
            row(number, free, lend_max=20, lent=lent, debts={99: 1} if borrows else {})
            for number, (free, lent, borrows) in enumerate(members, start=1)
        )
    )
    able = {
        number
        for number, (free, lent, borrows) in enumerate(members, start=1)
        if number != 1 and not borrows and free >= blocks and lent + blocks <= 20
    }
    found = drawn(ledger, blocks=blocks, seed=seed)
    assert set(found) <= able
    assert len(found) == len(set(found)) == min(3, len(able))


def test_near_members_and_those_with_more_room_are_asked_first_more_often():
    ledger = ledger_of(row(1), row(2, 40), row(3, 40, host="b"), row(4, 80, host="b"))
    first = Counter(drawn(ledger, seed=seed)[0] for seed in range(2000))
    # weights 160, 40 and 80
    assert 0.52 < first[2] / 2000 < 0.62
    assert 0.11 < first[3] / 2000 < 0.18
    assert 0.24 < first[4] / 2000 < 0.34
    always = lending.Weights(near=1e6)
    assert {drawn(ledger, seed=seed, weights=always)[0] for seed in range(50)} == {2}


def test_many_borrowers_do_not_ask_one_creditor():
    ledger = ledger_of(*(row(number, 90 + number % 7) for number in range(1, 101)))
    first = Counter(lending.Search(borrower, 10, seed=1).propose(ledger)[0] for borrower in range(1, 101))
    assert max(first.values()) <= 8
    assert len(first) > 40


def test_a_search_is_replayed_by_its_seed():
    rows = [row(number) for number in range(1, 30)]
    there, back = ledger_of(*rows), ledger_of(*reversed(rows))
    assert lending.Search(1, 10, seed=4).propose(there) == lending.Search(1, 10, seed=4).propose(back)
    assert lending.Search(1, 10, seed=4).propose(there) != lending.Search(1, 10, seed=5).propose(there)


def test_after_three_refusals_three_others_are_asked_until_nobody_is_left():
    ledger = ledger_of(*(row(number) for number in range(1, 9)))
    search = lending.Search(1, 10, seed=0)
    asked: list[int] = []
    while found := search.propose(ledger):
        for creditor in found:
            search.refuse(ledger, creditor, 40)  # says that it could, and does not
        asked += found
        assert len(asked) < 20
    assert sorted(asked) == list(range(2, 9))
    assert ledger.take(row(5, version=2))
    assert search.propose(ledger) == (5,)


@pytest.mark.parametrize(("near", "room"), [(0, 1), (-1, 1), (1, -1), (float("nan"), 1), (1, float("inf"))])
def test_weights_that_are_none_are_refused(near, room):
    with pytest.raises(ArgumentError, match="weights"):
        lending.Weights(near, room)


@pytest.mark.parametrize("blocks", [0, -1, 1.5, True])
def test_a_borrower_needs_whole_blocks(blocks):
    with pytest.raises(ArgumentError, match="needs"):
        drawn(ledger_of(row(1)), blocks=blocks)
    with pytest.raises(ArgumentError, match="needs"):
        lending.Search(1, blocks, seed=0)


def test_a_correction_can_be_ended_without_a_row():
    ledger = ledger_of(row(1, 100))
    ledger.correct(1, 0)
    assert ledger.lendable(1) == 0
    ledger.forgive(1)
    assert ledger.lendable(1) == 80
    ledger.forgive(9)


@pytest.mark.parametrize("changes", [{"blocks": lending.BLOCKS_MAX + 1}, {"debts": {2: lending.BLOCKS_MAX, 3: 1}}])
def test_a_row_of_more_blocks_than_any_member_has_is_refused(changes):
    """The sums over all members must not overflow."""
    with pytest.raises(ArgumentError, match="no member has more"):
        row(1, **changes)


@pytest.mark.parametrize(
    ("near", "room", "place", "member"),
    [(1e308, 300.0, 0, 3), (1.0, 1e300, 2, 2), (5e-324, 1.0, 0, 4), (5e-324, 0.0, 0, 4)],
)
def test_extreme_weights_neither_overflow_nor_tie(near, room, place, member):
    ledger = ledger_of(row(1), row(2, 40), row(3, 80), row(4, 80, host="b"))
    weights = lending.Weights(near, room)
    assert {drawn(ledger, seed=seed, weights=weights)[place] for seed in range(20)} == {member}


def test_dice_that_show_0_draw_too():
    class Zero(Random):
        def random(self):
            return 0.0

    assert lending.candidates(ledger_of(row(1), row(2)), 1, 10, Zero()) == (2,)
