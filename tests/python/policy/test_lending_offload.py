"""Which blocks go to creditors, and which come home."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError
from kvpool.policy import lending
from kvpool.policy.lending import Held, Loan, Offload, Payback


def plan(held, need, room, leaf=4, tail=1):
    return lending.plan_offload(held, need, room, leaf, tail)


@st.composite
def sequences(draw):
    made = []
    for name in range(draw(st.integers(0, 4))):
        cuts = sorted(draw(st.sets(st.integers(0, 40), max_size=6)))
        home = list(zip(cuts[::2], cuts[1::2], strict=False))
        blocks = max([end for _, end in home], default=0) + draw(st.integers(0, 3))
        made.append(Held(name, blocks, home, draw(st.lists(st.integers(1, 4), max_size=1))))
    return made


ROOM = st.dictionaries(st.integers(1, 4), st.integers(0, 30), max_size=4)


@given(sequences(), st.integers(0, 60), ROOM, st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_only_aligned_groups_at_home_go_and_never_more_than_fits(held, need, room, leaf, tail):
    found = plan(held, need, room, leaf, tail)
    home = {(each.sequence, block) for each in held for first, end in each.home for block in range(first, end)}
    tails = {(each.sequence, each.blocks - number) for each in held for number in range(1, tail + 1)}
    going = [(move.sequence, block) for move in found.moves for block in range(move.first, move.first + move.blocks)]
    assert len(going) == len(set(going))
    assert set(going) <= home - tails
    for creditor in {move.creditor for move in found.moves}:
        assert sum(move.blocks for move in found.moves if move.creditor == creditor) <= room[creditor]
    assert found.missing == max(0, need - len(going))
    assert len(going) < need + leaf
    if found.missing:  # then nothing is left that could go: a single block is the smallest group
        assert not home - tails - set(going) or len(going) == sum(room.values())
    assert found == plan(held, need, dict(reversed(room.items())), leaf, tail)


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))
def test_whole_leaves_go_where_that_is_possible(need, leaf):
    found = plan([Held("a", 100, [(0, 100)])], need, {1: 100}, leaf)
    (move,) = found.moves
    assert move == Offload("a", 0, -(-need // leaf) * leaf, 1)


def test_the_oldest_leaves_go_and_the_tail_stays():
    held = [Held("a", 14, [(0, 14)])]
    assert plan(held, 5, {1: 50}).moves == (Offload("a", 0, 8, 1),)
    assert plan(held, 99, {1: 50}).moves == (Offload("a", 0, 13, 1),)  # then groups of one, up to the tail
    assert plan(held, 99, {1: 50}, tail=3).moves == (Offload("a", 0, 11, 1),)
    assert plan(held, 99, {1: 50}, tail=3).missing == 88


def test_without_room_for_a_leaf_a_part_of_one_goes():
    held = [Held("a", 20, [(0, 20)])]
    assert plan(held, 4, {1: 3, 2: 2}).moves == (Offload("a", 0, 2, 1), Offload("a", 2, 2, 2))
    assert plan(held, 4, {}).missing == 4


def test_a_range_that_begins_inside_a_leaf_goes_from_the_next_one():
    held = [Held("a", 20, [(3, 17)])]
    assert plan(held, 8, {1: 50}).moves == (Offload("a", 4, 8, 1),)
    assert plan(held, 0, {1: 50}).moves == ()


def test_sequences_that_are_spread_already_go_on_and_then_the_largest():
    held = [Held("small", 9, [(0, 9)]), Held("large", 30, [(0, 30)]), Held("spread", 12, [(4, 12)], [2])]
    found = plan(held, 12, {1: 90, 2: 50})
    assert found.moves == (Offload("spread", 4, 4, 2), Offload("large", 0, 8, 1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"leaf": 3}, "power of two"),
        ({"leaf": 0}, "a leaf"),
        ({"tail": 0}, "a tail"),
        ({"need": -1}, "needed"),
        ({"room": {1: -1}}, "room at 1"),
    ],
)
def test_plans_of_impossible_numbers_are_refused(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        plan(**{"held": [], "need": 1, "room": {}, **arguments})


@pytest.mark.parametrize("home", [[(0, 5)], [(2, 2)], [(0, 2), (1, 3)], [(2, 3), (0, 1)], [(-1, 2)]])
def test_a_sequence_has_only_ranges_of_its_blocks(home):
    with pytest.raises(ArgumentError, match="ranges"):
        Held("a", 4, home)


LOANS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20), st.integers(1, 20), st.integers(0, 5)), max_size=5)


@given(LOANS, st.integers(0, 80), st.dictionaries(st.integers(1, 4), st.integers(0, 20)), st.sampled_from([1, 4, 8]))
def test_as_much_comes_home_as_has_room_and_no_more(made, room, wanted, leaf):
    loans = [Loan(name, *each) for name, each in enumerate(made)]
    found = lending.plan_payback(loans, room, wanted, leaf)
    assert sum(each.blocks for each in found) <= room
    by_name = {loan.sequence: loan for loan in loans}
    assert len({each.sequence for each in found}) == len(found)
    for each in found:
        loan = by_name[each.sequence]
        assert each.creditor == loan.creditor
        assert loan.first <= each.first < each.first + each.blocks == loan.first + loan.blocks
    everything = sum(loan.blocks for loan in loans)
    assert sum(each.blocks for each in found) >= min(room, everything) - (leaf - 1) * (room < everything) * len(loans)


def test_the_oldest_loans_come_home_first():
    loans = [Loan("new", 1, 0, 8, since=5), Loan("old", 2, 0, 8, since=3)]
    assert lending.plan_payback(loans, 8, leaf=4) == (Payback("old", 2, 0, 8),)
    assert lending.plan_payback(loans, 13, leaf=4) == (Payback("old", 2, 0, 8), Payback("new", 1, 4, 4))


def test_what_creditors_want_back_comes_home_before_older_loans():
    loans = [Loan("old", 1, 0, 8, since=1), Loan("b", 2, 0, 8, since=2), Loan("c", 3, 0, 8, since=3)]
    assert lending.plan_payback(loans, 8, {3: 8, 2: 5}, leaf=4) == (Payback("c", 3, 0, 8),)
    assert lending.plan_payback(loans, 12, {3: 3, 2: 6}, leaf=4) == (Payback("b", 2, 0, 8), Payback("c", 3, 4, 4))


def test_a_part_of_a_loan_is_cut_at_a_leaf_where_that_is_possible():
    loan = Loan("a", 1, 2, 20, since=0)  # blocks 2 to 22
    assert lending.plan_payback([loan], 9, leaf=8) == (Payback("a", 1, 16, 6),)
    assert lending.plan_payback([loan], 5, leaf=8) == (Payback("a", 1, 20, 2),)
    assert lending.plan_payback([loan], 1, leaf=8) == (Payback("a", 1, 21, 1),)
    assert lending.plan_payback([loan], 0, leaf=8) == ()


def test_a_payback_of_impossible_numbers_is_refused():
    for arguments in ({"room": -1}, {"room": 1, "leaf": 6}, {"room": 1, "wanted": {1: -1}}):
        with pytest.raises(ArgumentError):
            lending.plan_payback([], **arguments)


def test_what_the_neediest_creditor_wants_comes_before_older_loans_of_others():
    """Paying back may stop anywhere, so the order counts."""
    loans = [Loan("old", 3, 0, 8, since=1), Loan("b", 2, 0, 8, since=2), Loan("c", 1, 0, 8, since=3)]
    found = lending.plan_payback(loans, 24, {1: 8, 2: 3}, leaf=4)
    assert found == (Payback("c", 1, 0, 8), Payback("b", 2, 0, 8), Payback("old", 3, 0, 8))
    assert lending.plan_payback(loans, 24, {1: 0}, leaf=4)[0].sequence == "old"


@pytest.mark.parametrize("loan", [("a", 0, 0, 1, 0), ("a", 1, -1, 1, 0), ("a", 1, 0, 0, 0), ("a", 1, 0, True, 0)])
def test_a_loan_of_impossible_numbers_is_refused(loan):
    with pytest.raises(ArgumentError, match="sequence 'a'"):
        Loan(*loan)


def test_two_sequences_of_one_name_are_refused():
    with pytest.raises(ArgumentError, match="one name"):
        plan([Held("a", 9, [(0, 9)]), Held("a", 9, [(0, 9)])], 4, {1: 50})
