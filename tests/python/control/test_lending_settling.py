"""Debts that go round in a circle come home, with pools that are made up."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
from control.lending_kit import FakeCluster, FakeHandle, FakeRegistration, Ring, enter, lend, town_of
from transfer.kit import eventually

from kvpool import ArgumentError, Busy, ClosedError, DeadlineExceeded, MemberEvent
from kvpool.control.lending import Lending
from kvpool.policy import lending as policy


@pytest.mark.parametrize("settle_blocks", [1, 3, None])
def test_a_ring_of_full_pools_comes_home(settle_blocks):
    ring = Ring(settle_blocks=settle_blocks)
    assert ring.owed == [8, 8, 8]
    assert ring.turns(times=40) == 24
    assert ring.owed == [0, 0, 0]
    assert [len(pool.free_blocks) for pool, _ in ring.made] == [2, 0, 0]
    assert all(set(seq.owners) == {seq.pool.instance} for seq in ring.sequences)
    assert ring.calls == [None] * 3
    ring.check()


def test_loans_that_end_within_a_leaf_come_home_without_a_halt():
    """There is room for a leaf of four blocks, and whole leaves alone would leave each member with room for two."""
    ring = Ring(blocks=10, free=4)
    assert ring.turns(times=8) == 24
    assert ring.owed == [2, 2, 2]
    assert ring.calls == [None] * 3
    ring.check()


@pytest.mark.parametrize("gone", [1, 2])  # its own lease is lost, or another member leaves
def test_other_calls_go_on_while_cycles_are_looked_for(monkeypatch, gone):
    """In a cluster of a thousand members that takes long. One that is found leaves meanwhile."""
    ring = Ring()
    searches = []

    def search(debts, least):
        assert not ring.lending(1)._lock.locked()
        searches.append(dict(debts))
        if len(searches) == 1:
            ring.town.tell(MemberEvent("lost", ring.town.members[gone]))
        return policy.settle(debts, least)

    monkeypatch.setattr("kvpool.policy.lending.coordinator.settle", search)
    assert ring.turns((1,)) == 0
    assert searches == [{(1, 2): 8, (2, 3): 8, (3, 1): 8}]
    assert ring.calls == [None] * 3


def test_debts_below_the_least_stay():
    ring = Ring(settle_min=9)
    assert ring.turns(times=5) == 0
    assert ring.calls == [None] * 3


def test_the_reserve_is_not_used_up():
    ring = Ring(reserve=3)  # two blocks are free
    assert ring.turns(times=5) == 0
    assert ring.owed == [8, 8, 8]


def test_what_nobody_has_room_for_is_asked_for_ever_more_rarely():
    ring = Ring(free=0)
    before = ring.town.published
    asked = set()
    for _ in range(24):
        assert ring.turns() == 0
        asked |= {call.number for call in ring.calls if call is not None}
        assert ring.turns(times=3) == 0
        assert ring.calls == [None] * 3
        ring.now += 36_000.0  # a pause
    assert 4 <= len(asked) <= 5  # after 0, 1, 3, 7 and 15 pauses
    assert ring.town.published - before == 4 * len(asked)
    ring.make_room(1, 2)
    ring.now += 1e7
    assert ring.turns(times=40) == 24


def test_members_whose_engines_do_not_call_take_no_part():
    ring = Ring(takes_part=(1, 2))
    assert ring.turns((1, 2), times=5) == 0
    assert ring.calls == [None] * 3
    assert "settling" not in ring.town.members[3].lending
    ring.turns()
    ring.now += 1e6
    assert ring.turns(times=40) == 24


def ceases_by_now(ring):
    """Also whose engine has ceased to take turns is by the made-up clock."""
    for _, lending in ring.made:
        lending._own._clock = lambda: ring.now
        lending._own.note_turn()


def test_one_whose_engine_ceases_to_call_takes_no_part_until_it_calls_again():
    """It is alive, so its record stays, and with it the call that it made and what others said to that."""
    ring = Ring(settle_blocks=3)
    ceases_by_now(ring)
    ring.begin()
    ring.now += 599.0
    ring.turns((2, 3))
    ring.lending(1).publish()
    assert not ring.lending(1).publish()
    assert ring.lending(2)._settling._settler.said.answers
    ring.now += 1.0
    assert ring.lending(1).publish()
    assert "settling" not in ring.town.members[1].lending
    assert not ring.lending(1).publish()
    ring.turns((2, 3))
    assert not ring.lending(2)._settling._settler.said.answers
    assert ring.turns() == 0
    assert "settling" in ring.town.members[1].lending
    ring.now += 1e6
    assert ring.turns(times=40) == 18


def test_an_engine_that_ceases_to_call_does_not_hold_up_the_others():
    """Members 2 and 3 owe each other, too; what 2 owes is all needed for the larger circle, which 1 coordinates."""
    ring = Ring()
    ceases_by_now(ring)
    ring.make_room(2, 4)
    lend(ring.lending(3), ring.sequences[2], 8, 4, "m2")
    ring.lending(3).publish()
    assert ring.owed == [8, 8, 12]
    for _ in range(4):
        ring.now += 36_000.0
        ring.lending(1).publish()
        ring.turns((2, 3), times=10)
    assert ring.owed == [8, 4, 8]
    ring.check()


def test_what_is_frozen_is_paid_back_when_the_freeze_ends():
    ring = Ring(settle_blocks=3)
    ring.begin()
    ring.make_room(1, 6)
    assert ring.lending(1).payback() == 0
    assert ring.owed == [6, 6, 6]
    ring.now += 600.0
    assert ring.frozen == [0, 0, 0]
    assert ring.lending(1).payback() == 6
    assert ring.owed == [0, 6, 6]
    ring.check()


def test_more_than_is_frozen_is_paid_back_into_room_that_no_round_needs():
    ring = Ring(settle_blocks=3)
    ring.begin()
    extra = ring.sequences[0]
    ring.make_room(2, 4)
    lent = ring.pool(1).alloc(4, 2, False, instance="m2")
    ring.pool(1).transfer("m2", extra.addrs[8:12], to=lent)
    ring.pool(1).free(extra.replace(8, lent))  # four blocks more than are frozen
    assert ring.owed == [10, 6, 6]
    assert ring.lending(1).payback() == 4
    assert ring.frozen == [6, 6, 6]
    assert ring.owed == [6, 6, 6]
    ring.check()


def test_the_room_that_a_round_needs_is_not_used_otherwise():
    ring = Ring(settle_blocks=3)
    ring.begin()
    ring.make_room(1, 3)
    ring.pool(1).moving_failure = Busy("not now")
    ring.lending(1).settle()  # it calls the next round, of two blocks
    assert len(ring.pool(1).free_blocks) == 5
    assert ring.lending(1)._settling.room() == 3


def test_a_recall_wins_and_ends_the_settlement():
    ring = Ring(settle_blocks=3)
    ring.begin()
    ring.make_room(2, 6)
    theirs = [addr for addr in ring.sequences[1].addrs.tolist() if addr >> 50 == 3]
    assert ring.lending(2).give_back(theirs) == 6
    assert ring.owed == [6, 0, 6]
    ring.turns(times=3)
    assert ring.calls == [None] * 3
    assert ring.frozen == [0, 0, 0]
    ring.check()


def test_a_coordinator_that_is_killed_between_rounds_holds_nobody_up():
    ring = Ring(settle_blocks=3)
    ring.begin()
    ring.town.remove("m1")
    assert ring.turns((2, 3), times=3) == 0
    assert ring.frozen[1:] == [0, 0]
    ring.make_room(2, 6)
    assert ring.lending(2).payback() == 6


def test_a_coordinator_that_stops_holds_nobody_up_for_longer_than_the_freeze():
    ring = Ring(settle_blocks=3)
    ring.begin()
    ring.turns((2, 3), times=5)
    assert ring.frozen[1:] == [6, 6]  # the room is where it stopped
    ring.now += 600.0
    assert ring.frozen[1:] == [0, 0]
    ring.make_room(2, 6)
    assert ring.turns((2, 3), times=5) == 0
    assert ring.lending(2).payback() == 6


def test_a_member_that_closes_in_the_middle_ends_the_settlement():
    ring = Ring(settle_blocks=3)
    ring.begin()
    ring.lending(2).close()
    with pytest.raises(ClosedError):
        ring.lending(2).settle()
    ring.turns((1, 3), times=2)
    assert ring.calls == [None] * 3
    assert (ring.frozen[0], ring.frozen[2]) == (0, 0)
    ring.check()


def in_two_pieces(ring, number):
    """Six blocks that a member owes lie in two pieces, and four of them are due at once."""
    ring.make_room(number, 8)
    seq = ring.sequences[number - 1]
    assert ring.lending(number).give_back(seq.addrs[3:5]) == 2
    ring.turns()
    return seq


def test_a_step_ends_with_its_freeze():
    """The first of its parts takes so long that the freeze is over before the second."""
    ring = Ring(settle_blocks=8)
    seq = in_two_pieces(ring, 1)

    def take_long():
        ring.now += 600.0

    seq.meanwhile = take_long
    assert ring.lending(1).settle() == 3
    assert ring.calls[0].due == 4
    assert ring.owed == [3, 8, 8]
    assert ring.frozen == [0, 0, 0]
    assert ring.turns(times=3) == 0
    ring.check()


def test_a_step_ends_when_its_coordinator_ends_the_settlement():
    ring = Ring(settle_blocks=8)
    seq = in_two_pieces(ring, 2)
    ring.lending(1).settle()  # it calls the round
    seq.meanwhile = ring.lending(1).close
    assert ring.lending(2).settle() == 3
    assert ring.owed[1:] == [3, 8]
    assert ring.frozen[1] == 0
    ring.check()


def of_a_stopped_creditor(ring):
    """How long member 1 waits for each answer, from now on."""
    waited = []

    def fetch(peer, blocks, *, to, timeout=None):
        waited.append(timeout)
        return FakeHandle(DeadlineExceeded("it is stopped"))

    ring.pool(1).settings = SimpleNamespace(timeout_s=1e6)
    ring.pool(1).fetch = fetch
    return waited


def test_a_creditor_is_waited_for_no_longer_than_the_freeze_counts():
    ring = Ring(settle_blocks=8)
    ring.turns()
    waited = of_a_stopped_creditor(ring)
    ring.now += 597.0
    assert ring.lending(1).settle() == 0
    assert 0.0 < waited[0] <= 3.0
    ring.check()


def test_other_calls_wait_a_while_for_a_creditor_that_is_stopped_and_no_longer():
    ring = Ring(settle_blocks=8)
    ring.turns()
    waited = of_a_stopped_creditor(ring)
    assert ring.lending(1).settle() == 0
    assert 0.0 < waited[0] <= 60.0  # a tenth of the freeze
    assert len(waited) == 1
    ring.check()


def test_a_recall_waits_for_the_leaf_that_is_under_way_and_for_no_other():
    ring = Ring(settle_blocks=8, free=8)
    ring.turns()  # eight blocks are due, and have room: two leaves
    seq, came = ring.sequences[0], []
    recalled = seq.addrs[:2].copy()
    thread = threading.Thread(target=lambda: came.append(ring.lending(1).give_back(recalled)))

    def recall():
        thread.start()
        eventually(lambda: ring.lending(1)._settling._recalls == 1)

    seq.meanwhile = recall
    assert ring.lending(1).settle() == 4
    thread.join(10.0)
    assert came == [2]
    assert ring.owed == [2, 8, 8]
    ring.check()


def test_blocks_that_do_not_come_are_tried_again():
    ring = Ring(settle_blocks=3)
    ring.turns()
    ring.pool(2).moving_failure = Busy("not now")
    ring.turns(times=3)
    assert ring.owed == [6, 8, 8]
    ring.check()
    ring.pool(2).moving_failure = None
    assert ring.turns(times=40) == 22
    ring.check()


def test_a_turn_without_time_changes_nothing():
    ring = Ring()
    ring.turns()
    with pytest.raises(DeadlineExceeded):
        ring.lending(1).settle(timeout=0.0)
    assert ring.owed == [8, 8, 8]
    with pytest.raises(ArgumentError, match="timeout"):
        ring.lending(1).settle(timeout=-1.0)


def test_a_round_costs_one_record_of_each_member():
    ring = Ring(blocks=100, settle_blocks=4, free=4)
    for _ in range(6):  # a call and its answers, then rounds
        before = ring.town.published
        ring.turns()
        assert ring.town.published - before == 3
    before = ring.town.published
    ring.lending(2).settle()  # it has nothing new to say
    assert ring.town.published == before


def test_a_second_lending_of_a_process_begins_anew():
    ring = Ring(settle_blocks=3)
    ring.begin()
    ring.lending(1).close()
    ring.turns((2, 3), times=2)
    assert ring.frozen[1:] == [0, 0]
    registration = FakeRegistration(ring.town, ring.town.members[1])
    again = Lending(ring.pool(1), FakeCluster(ring.town, registration), settle_min=1, settle_blocks=3)
    again.watch(ring.sequences[0])
    again._settling._clock = lambda: ring.now
    ring.made[0] = ring.pool(1), again
    assert ring.turns(times=40) == 18
    ring.check()


def test_settlements_are_logged(caplog):
    with caplog.at_level(logging.INFO, "kvpool.lending"):
        ring = Ring()
        ring.turns(times=40)
    assert "8 blocks each of members (1, 2, 3)" in caplog.text
    assert "is complete: 8 blocks each" in caplog.text


def test_wrong_arguments_are_refused():
    town, _ = town_of(20)
    for options in ({"settle_min": 0}, {"settle_min": 1.5}, {"settle_blocks": 0}, {"settle_blocks": True}):
        with pytest.raises(ArgumentError, match="settle_"):
            enter(town, 9, 10, **options)
