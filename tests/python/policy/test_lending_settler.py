"""What one member says and does in settlements, by what it is told: no other member takes part."""

from __future__ import annotations

import pytest
from policy.lending_kit import ledger_of, row

from kvpool import ArgumentError
from kvpool.policy import lending


def settler_of(member=2, ledger=None, **options):
    ledger = ledger or ledger_of(row(1, debts={2: 9}), row(2, debts={1: 9}), row(3))
    return lending.Settler(member, ledger, lending.SettlementRules(1, 4, 4, 60.0, 10.0), **options)


def call_of(number=1, due=0, members=(1, 2), blocks=9, seconds=60.0, unit=1):
    return lending.Call(lending.Settlement(members, blocks), (1,) * len(members), number, seconds, due, unit)


def hear(settler, call, member=1, now=0.0, able=9, room=1):
    settler.hear(member, lending.Said(call))
    return settler.turn(now, lambda _: able, lambda: room)


def test_a_freeze_that_ends_in_a_round_leaves_nobody_out_that_brought_blocks_home():
    ledger = ledger_of(row(1, debts={2: 90}), row(2, debts={1: 90}))
    settler = lending.Settler(1, ledger, lending.SettlementRules(1, 8, 4, 60.0, 10.0))
    now = 0.0
    for _ in range(5):
        settler.hear(2, lending.Said())
        begin = now
        while settler.said.call is None:
            settler.turn(now, lambda _: 90, lambda: 9)
            now += 1.0
        assert now <= begin + 16.0  # at the next look
        key = settler.said.call.key
        for home in (0, 5):
            settler.hear(2, lending.Said(None, {1: lending.Answer(*key, "agreed", 90, 9, home)}))
            settler.turn(now, lambda _: 90, lambda: 9)
        assert settler.said.call.due == 8
        now += 60.0
        settler.turn(now, lambda _: 90, lambda: 9)
        assert settler.said.call is None


def test_a_round_is_no_larger_than_the_room_goes_round_in_a_while():
    ledger = ledger_of(row(1, debts={2: 90}), row(2, debts={1: 90}))
    settler = lending.Settler(1, ledger, lending.SettlementRules(1, 64, 4, 60.0, 10.0))
    settler.hear(2, lending.Said())
    settler.turn(0.0, lambda _: 90, lambda: 1)
    settler.hear(2, lending.Said(None, {1: lending.Answer(*settler.said.call.key, "agreed", 90, 2)}))
    settler.turn(1.0, lambda _: 90, lambda: 1)
    assert (settler.said.call.unit, settler.said.call.due) == (2, 16)


def test_one_that_has_brought_home_all_is_not_busy_whatever_becomes_of_its_coordinator():
    """Member 1 stands still with its call; 2 and 3 owe each other, too."""
    ledger = ledger_of(row(1, debts={2: 6}), row(2, debts={1: 6, 3: 9}), row(3, debts={2: 9}))
    settler = settler_of(2, ledger)
    assert hear(settler, call_of(blocks=6), now=20.0) is None
    settler.brought(hear(settler, call_of(blocks=6, due=6), now=20.0), 6)
    settler.hear(3, lending.Said())
    for now in (30.0, 40.0, 50.0, 60.0):
        settler.turn(now, lambda _: 9, lambda: 1)
    assert settler.said.call is not None
    assert settler.said.call.settlement.members == (2, 3)


def test_nothing_is_due_before_the_coordinator_calls_and_after_it_ends():
    settler = settler_of()
    assert hear(settler, call_of()) is None
    assert settler.said.answers[1] == lending.Answer(1, 1, "agreed", 9, 1, 0)
    assert settler.frozen(1, 0.0) == 9
    due = hear(settler, call_of(due=4))
    assert due == lending.Due(1, 4, 1, (1, 1), 1, 60.0)
    settler.brought(due, 3)
    assert settler.due(0.0).blocks == 1
    assert settler.frozen(1, 0.0) == 6
    assert hear(settler, None) is None
    assert settler.frozen(1, 0.0) == 0
    settler.brought(due, 1)  # it was moving when the call ended
    assert hear(settler, call_of(due=4)) is None  # an old record again
    assert settler.said.answers[1].state == "refused"


def test_no_leaf_is_cut_where_a_member_has_room_for_one():
    settler = settler_of()
    hear(settler, call_of())
    due = hear(settler, call_of(due=9, unit=4))
    assert [due.portion(room) for room in (0, 3, 4, 7, 8, 9, 20)] == [0, 0, 4, 4, 8, 9, 9]


@pytest.mark.parametrize(
    ("rooms", "able", "unit", "due"),
    [((0, 9), 20, 4, 8), ((3, 0), 20, 2, 8), ((1, 0), 20, 1, 8), ((9, 9), 7, 4, 4), ((9, 9), 3, 2, 2)],
)
def test_a_coordinator_calls_units_that_a_member_has_room_for(rooms, able, unit, due):
    ledger = ledger_of(row(1, debts={2: 20}), row(2, debts={1: 20}))
    settler = lending.Settler(1, ledger, lending.SettlementRules(1, 8, 4, 60.0, 10.0))
    settler.hear(2, lending.Said())
    settler.turn(0.0, lambda _: able, lambda: rooms[0])
    call = settler.said.call
    assert (call.due, call.settlement.blocks) == (0, 20)
    settler.hear(2, lending.Said(None, {1: lending.Answer(*call.key, "agreed", able, rooms[1])}))
    settler.turn(1.0, lambda _: able, lambda: rooms[0])
    assert (settler.said.call.unit, settler.said.call.due) == (unit, due)


def test_others_are_told_what_they_wait_for_and_nothing_else():
    settler = settler_of()

    def news():
        had, settler.news = settler.news, False
        return had

    assert not news()
    hear(settler, call_of())
    assert news()
    due = hear(settler, call_of(due=4))
    assert not news()
    settler.brought(due, 3)
    assert not news()  # the round goes on
    settler.brought(due, 1)  # the second part of what was due at the turn
    assert news()
    assert hear(settler, call_of(due=4)) is None
    assert not news()
    hear(settler, None)
    assert not news()


def test_a_freeze_ends_without_a_turn():
    settler = settler_of()
    hear(settler, call_of())
    assert settler.frozen(1, 59.9) == 9
    assert settler.frozen(1, 60.0) == 0
    assert hear(settler, call_of(due=4), now=60.0) is None
    assert settler.said.answers[1].state == "ended"


def test_a_call_whose_rounds_have_begun_is_not_agreed_to():
    """One that is made anew in the same term does not know what it had agreed to and brought home."""
    settler = settler_of()
    assert hear(settler, call_of(due=4)) is None
    assert settler.said.answers[1].state == "refused"
    assert settler.frozen(1, 0.0) == 0


def test_a_circle_of_more_members_than_a_record_names_is_not_called():
    def first_call(members):
        ledger = ledger_of(*(row(one, debts={one % members + 1: 9}) for one in range(1, members + 1)))
        settler = settler_of(1, ledger)
        for one in range(2, members + 1):
            settler.hear(one, lending.Said())
        settler.turn(0.0, lambda _: 9, lambda: 1)
        return settler.said.call

    assert len(first_call(lending.MEMBERS_MAX).terms) == lending.MEMBERS_MAX
    assert first_call(lending.MEMBERS_MAX + 1) is None
    with pytest.raises(ArgumentError, match="65 members"):
        call_of(members=tuple(range(1, lending.MEMBERS_MAX + 2)))


def test_what_is_no_call_for_this_member_is_not_answered():
    settler = settler_of()
    hear(settler, call_of(members=(1, 3)))
    hear(settler, call_of(members=(1, 2)), member=3)  # it is not the coordinator
    assert not settler.said.answers


def test_calls_and_answers_that_cannot_be_are_refused():
    settlement = lending.Settlement((1, 2), 9)
    for arguments in (
        ((1,), 1, 60.0, 0), ((1, -1), 1, 60.0, 0), ((1, 1), -1, 60.0, 0), ((1, 1), 1, 0.0, 0),
        ((1, 1), 1, float("inf"), 0), ((1, 1), 1, 601.0, 0), ((1, 1), 1, 60.0, 10), ((1, 1), 1, 60.0, -1),
        ((1, 1), 1, 60.0, 0, 0),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            lending.Call(settlement, *arguments)
    for arguments in ((1, 1, "yes"), (1, 1, "agreed", -1), (1.5, 1, "agreed"), (1, -1, "agreed")):
        with pytest.raises(ArgumentError):
            lending.Answer(*arguments)
    answer = lending.Answer(1, 1, "agreed")
    with pytest.raises(ArgumentError, match="33 answers"):
        lending.Said(None, dict.fromkeys(range(1, 34), answer))
    with pytest.raises(ArgumentError, match="coordinator"):
        lending.Said(None, {0: answer})
    for options in ({"least": 0}, {"chunk": 0}):
        with pytest.raises(ArgumentError):
            lending.SettlementRules(**({"least": 1, "chunk": 1} | options), leaf=4, freeze_s=1.0, pause_s=1.0)


def test_a_member_answers_no_more_coordinators_than_its_record_has_room_for():
    count = lending.ANSWERS_MAX + 1
    ledger = ledger_of(*(row(number) for number in range(1, count + 2)))
    settler = settler_of(count + 1, ledger)
    for coordinator in range(1, count + 1):
        settler.hear(coordinator, lending.Said(call_of(members=(coordinator, count + 1))))
    settler.turn(0.0, lambda _: 9, lambda: 1)
    assert len(settler.said.answers) == lending.ANSWERS_MAX
    assert [answer.state for answer in settler.said.answers.values()].count("agreed") == 1
