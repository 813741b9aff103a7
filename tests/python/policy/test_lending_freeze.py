"""Freezes: what they cover, and when they end."""

from __future__ import annotations

import pytest
from policy.lending_kit import ledger_of, row

from kvpool import ArgumentError
from kvpool.policy import lending

CYCLE = lending.Settlement((1, 2, 3), 8)


def members():
    return ledger_of(row(1), row(2, term=4), row(3), row(4))


def freeze(ledger, number=0, expires=10.0, settlement=CYCLE):
    return lending.freeze_of(settlement, ledger, number, expires)


def test_a_freeze_covers_the_debts_of_its_cycle_until_its_time_is_over():
    ledger, freezes = members(), lending.Freezes(2)
    assert freezes.frozen(2, 3, ledger, 0.0) == 0
    assert freezes.agree(freeze(ledger), ledger, 0.0)
    assert [freezes.frozen(*debt, ledger, 9.9) for debt in ((1, 2), (2, 3), (3, 1), (2, 1), (2, 4))] == [8, 8, 8, 0, 0]
    assert freezes.frozen(2, 3, ledger, 10.0) == 0
    assert freezes.current(ledger, 0.0) is None  # and it does not come back


def test_a_freeze_ends_when_a_member_leaves_or_comes_back():
    ledger = members()
    made = freeze(ledger)
    assert made.terms == (1, 4, 1)
    assert made.void(ledger, 0.0) == ""
    ledger.take(row(2, term=4, version=7))
    assert made.void(ledger, 0.0) == ""
    ledger.take(row(2, term=5))
    assert made.void(ledger, 0.0) == "member 2 is in term 5, and was in 4"
    ledger.leave(2)
    assert made.void(ledger, 0.0) == "member 2 has left"
    assert made.void(ledger, 10.0) == "its time is over"
    assert not lending.Freezes(1).agree(made, ledger, 0.0)
    with pytest.raises(ArgumentError, match="no row"):
        freeze(ledger)


def test_one_freeze_at_a_time():
    ledger, freezes = members(), lending.Freezes(2)
    other = lending.Settlement((2, 4), 3)
    assert freezes.agree(freeze(ledger, 5), ledger, 0.0)
    assert not freezes.agree(freeze(ledger, 9, settlement=other), ledger, 0.0)  # another coordinator
    assert not freezes.agree(freeze(ledger, 4), ledger, 0.0)  # a late message
    assert freezes.agree(freeze(ledger, 5), ledger, 0.0)
    assert freezes.agree(freeze(ledger, 6), ledger, 0.0)
    assert freezes.agree(freeze(ledger, 0, 30.0, settlement=other), ledger, 10.0)  # that of the first is over
    assert freezes.frozen(2, 4, ledger, 29.0) == 3


def test_what_came_home_is_no_longer_frozen():
    ledger, freezes = members(), lending.Freezes(3)
    freezes.agree(freeze(ledger, 5), ledger, 0.0)
    freezes.brought(1, 4, 8)  # of an earlier freeze
    freezes.brought(1, 5, 3)
    assert freezes.frozen(3, 1, ledger, 0.0) == 5
    freezes.brought(1, 5, 5)
    assert freezes.current(ledger, 0.0) is None


def test_a_freeze_is_lifted_by_its_number():
    ledger, freezes = members(), lending.Freezes(3)
    freezes.agree(freeze(ledger, 5), ledger, 0.0)
    freezes.lift(1, 4)
    freezes.lift(2, 5)
    assert freezes.frozen(3, 1, ledger, 0.0) == 8
    freezes.lift(1, 5)
    assert freezes.frozen(3, 1, ledger, 0.0) == 0


def test_only_members_of_a_cycle_agree_and_each_has_a_term():
    ledger = members()
    with pytest.raises(ArgumentError, match="not on the cycle"):
        lending.Freezes(4).agree(freeze(ledger), ledger, 0.0)
    with pytest.raises(ArgumentError, match="2 terms for 3 members"):
        lending.Freeze(CYCLE, (1, 1), 0, 1.0)


def test_a_request_that_arrives_twice_freezes_nothing_anew():
    ledger, freezes = members(), lending.Freezes(3)
    assert freezes.agree(freeze(ledger, 5), ledger, 0.0)
    freezes.brought(1, 5, 3)
    assert freezes.agree(freeze(ledger, 5, 99.0), ledger, 0.0)
    assert freezes.frozen(3, 1, ledger, 0.0) == 5
    assert freezes.frozen(3, 1, ledger, 10.0) == 0
    assert not freezes.agree(freeze(ledger, 5, 99.0), ledger, 10.0)


def test_a_freeze_that_was_lifted_is_not_agreed_to_again():
    ledger, freezes = members(), lending.Freezes(3)
    assert freezes.agree(freeze(ledger, 5), ledger, 0.0)
    freezes.lift(1, 5)
    assert not freezes.agree(freeze(ledger, 5), ledger, 0.0)
    assert not freezes.agree(freeze(ledger, 4), ledger, 0.0)
    assert freezes.agree(freeze(ledger, 6), ledger, 0.0)
    freezes.lift(1, 6)
    ledger.take(row(1, term=2))  # the coordinator counts anew
    assert freezes.agree(freeze(ledger, 0), ledger, 0.0)


def test_a_number_is_for_one_cycle_only():
    ledger, freezes = members(), lending.Freezes(3)
    assert freezes.agree(freeze(ledger, 5), ledger, 0.0)
    assert not freezes.agree(freeze(ledger, 5, settlement=lending.Settlement((1, 3), 8)), ledger, 0.0)


@pytest.mark.parametrize("expires", [float("inf"), float("nan")])
def test_a_freeze_that_never_ends_cannot_be_made(expires):
    with pytest.raises(ArgumentError, match="never comes"):
        freeze(members(), expires=expires)


def test_impossible_numbers_are_refused():
    ledger, freezes = members(), lending.Freezes(3)
    freezes.agree(freeze(ledger, 5), ledger, 0.0)
    with pytest.raises(ArgumentError, match="came home"):
        freezes.brought(1, 5, -3)
    with pytest.raises(ArgumentError, match="the term"):
        lending.Freeze(CYCLE, (1, -1, 1), 0, 1.0)
