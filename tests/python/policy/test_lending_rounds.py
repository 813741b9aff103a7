"""Settlement between members: what each does by what the others say, whatever is late, doubled, left out or lost."""

from __future__ import annotations

import os
from random import Random

import pytest
from policy.lending_kit import net_of
from policy.settling_kit import CHUNK, FREEZE_S, LEAF, PAUSE_S, Town, ring

SEEDS = range(300) if os.environ.get("KVPOOL_LONG") else range(12)


def until(town, done, ticks=400):
    for _ in range(ticks):
        town.tick()
        if done():
            return
    raise AssertionError("it does not come to that")


def frozen(town):
    return any(
        party.settler.frozen(creditor, party.now) or party.settler.due(party.now)
        for party in town.up
        for creditor in town.parties
        if creditor != party.number
    )


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_ring_with_two_free_blocks_comes_home(members):
    town = ring(1, members=members)
    until(town, lambda: not any(town.owed.values()))
    for _ in range(5):
        town.tick()
    assert town.completed == 1
    assert not town.stops
    assert [party.free for party in town.up] == [0] * (members - 1) + [2]
    assert not frozen(town)


def test_a_round_costs_one_record_of_each_member():
    town = ring(1, blocks=30)
    before = town.published
    until(town, lambda: town.completed)
    rounds = 30 // LEAF
    assert town.published - before <= 3 * (rounds + 2) + 6  # an answer, a round, an end; rows that have moved


def rough(seed):
    """Members die, come back, borrow, and take no turns for a while, in the middle of settlements."""
    dice = Random(seed)
    members = dice.randint(3, 7)
    pairs = [(a, b) for a in range(1, members + 1) for b in range(1, members + 1) if a != b and dice.random() < 0.5]
    owed = {pair: dice.randint(1, 30) for pair in pairs}
    town = Town(seed, owed, {number: dice.choice([0, 0, 1, 5]) for number in range(1, members + 1)})
    for _ in range(400):
        town.tick()
        what = dice.random()
        victim = town.parties[dice.randint(1, members)]
        if what < 0.003:
            town.kill(victim.number)
        elif what < 0.008:
            town.come_back(victim.number)
        elif what < 0.02:
            victim.takes_turns = not victim.takes_turns
        elif what < 0.04 and victim.free:
            victim.free -= 1  # its engine needs a block
        elif what < 0.06:
            victim.free += 1
        elif what < 0.2:
            town.borrow(victim.number, dice.randint(1, members), dice.randint(1, 20))
    return town


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_goes_wrong_no_step_is_wrong_and_nothing_is_stuck_in_the_end(seed):
    """The steps are checked when they are made (settling_kit.py)."""
    town = rough(seed)
    for party in town.up:
        party.free += 1
        party.takes_turns = True
    town.calm(1500)
    assert not town.left()
    assert not frozen(town)


def test_settlements_complete_and_stop_in_many_ways_while_members_die():
    towns = [rough(seed) for seed in range(8)]
    stops = " ".join(stop for town in towns for stop in town.stops)
    assert sum(town.completed for town in towns) > 5
    for why in ("has left", "its time is over", "has refused", "does not answer", "in term"):
        assert why in stops


@pytest.mark.parametrize("seed", SEEDS)
def test_net_debts_are_as_before_when_nobody_dies(seed):
    dice = Random(seed)
    owed = {(a, b): dice.randint(1, 30) for a in range(1, 6) for b in range(1, 6) if a != b and dice.random() < 0.6}
    town = Town(seed, owed, {number: dice.choice([1, 4]) for number in range(1, 6)})
    for _ in range(200):
        town.tick()
    town.calm(600)
    assert not town.left()
    assert not frozen(town)
    if town.is_even():  # a round that is cut moves room, as pay-back does
        assert net_of(town.owed) == net_of(owed)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_member_that_dies_between_rounds_holds_nobody_up(number):
    town = ring(2)
    until(town, lambda: any(call.due >= 2 * CHUNK for call in town.calls.values()))
    town.kill(number)
    for _ in range(3):
        town.tick()  # the loss is told
    assert not frozen(town)
    before = dict(town.owed)
    for _ in range(200):
        town.tick()
    assert town.owed == before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_member_that_stops_between_rounds_holds_nobody_up_beyond_the_time_of_the_freeze(number):
    """A coordinator that is stopped, or whose death nobody is told of, leaves freezes that only time ends."""
    town = ring(2)
    until(town, lambda: any(call.due >= 2 * CHUNK for call in town.calls.values()))
    town.parties[number].takes_turns = False
    others = [party for party in town.up if party.number != number]
    town.tick()
    assert any(party.settler.frozen(creditor, party.now) for party in others for creditor in party.debts)
    for _ in range(int(FREEZE_S) + 10):
        town.tick()
    assert not any(party.settler.frozen(creditor, party.now) for party in others for creditor in party.debts)
    assert not any(party.settler.due(party.now) for party in town.up)
    town.parties[number].takes_turns = True
    town.calm(600)
    assert not town.left()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_member_in_a_new_term_voids_the_settlement(number):
    town = ring(3)
    until(town, lambda: any(call.due >= 2 * CHUNK for call in town.calls.values()))
    town.come_back(number)
    for _ in range(3):
        town.tick()
    assert not frozen(town)
    assert not any(town.parties[number].debts)


def test_a_long_settlement_is_several_and_none_is_cut_in_a_round():
    town = ring(1, blocks=70)
    until(town, lambda: not any(town.owed.values()))
    for _ in range(5):
        town.tick()
    assert town.completed == len(town.calls) > 1
    assert not town.stops
    assert town.is_even()
    assert town.now < 3 * FREEZE_S


def test_a_circle_without_room_does_not_keep_its_coordinator_from_others():
    """The larger comes first, and nobody on it has a free block; the smaller has some."""
    pairs = {(1, 2): 30, (2, 3): 30, (3, 1): 30, (1, 4): 20, (4, 5): 20, (5, 1): 20}
    town = Town(9, pairs, {1: 0, 2: 0, 3: 0, 4: 0, 5: 2}, is_rough=False)
    until(town, lambda: town.completed)
    assert {pair for pair, blocks in town.owed.items() if blocks} == {(1, 2), (2, 3), (3, 1)}
    assert len(town.calls) < 6


def test_a_member_whose_debts_are_smaller_than_its_row_says_ends_the_settlement():
    town = ring(4)
    town.owed[2, 3] = 1  # a sequence has ended
    town.parties[3].free += 19
    until(town, lambda: town.stops)
    assert "smaller than the rows say" in town.stops[0]
    town.calm(200)
    assert town.owed == {(1, 2): 20, (2, 3): 1, (3, 1): 20}


def test_what_comes_home_otherwise_meanwhile_ends_the_settlement():
    """A recall wins: the debt is gone before the settlement has brought it home."""
    town = ring(5)
    until(town, lambda: any(call.due >= 2 * CHUNK for call in town.calls.values()))
    town.owed[2, 3], gone = 0, town.owed[2, 3]
    town.parties[3].free += gone
    until(town, lambda: town.stops, int(PAUSE_S))
    assert town.stops == [town.stops[0]]
    assert "member 2 has ended its freeze" in town.stops[0]
    town.tick()
    assert not frozen(town)


def test_a_member_that_takes_no_turns_is_left_out_for_longer_and_longer():
    town = ring(6)
    town.parties[2].takes_turns = False
    asked = []
    for _ in range(1000):
        town.tick()
        asked.append(len(town.calls))
    assert all("member 2 does not answer" in stop for stop in town.stops)
    assert 3 <= asked[-1] <= 7
    assert town.owed == {(1, 2): 20, (2, 3): 20, (3, 1): 20}
    town.calm(1200)
    assert not any(town.owed.values())


def test_two_coordinators_of_one_member_do_not_both_get_it():
    """Both cycles have member 3, and each coordinator calls before it hears of the other."""
    town = Town(7, {(1, 3): 20, (3, 1): 20, (2, 3): 20, (3, 2): 20}, {1: 1, 2: 1, 3: 0}, is_rough=False)
    for party in town.up:  # also what comes second goes at once
        party.settler._coordinator._waits = True
    until(town, lambda: any("member 3 has refused" in stop for stop in town.stops), 30)
    town.calm(400)
    assert not any(town.owed.values())
    assert town.completed == 2


def test_a_settlement_that_comes_after_a_larger_one_waits_for_it():
    town = Town(8, {(1, 3): 20, (3, 1): 20, (2, 3): 15, (3, 2): 15}, {1: 1, 2: 1, 3: 0}, is_rough=False)
    until(town, lambda: town.completed == 2)
    assert not town.stops
