"""Who plans, and which plans count: each at most once, none of an old epoch, none of a planner that was replaced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool.policy.rebalancing import (
    EpochPlan,
    InstanceState,
    Placement,
    PlanBook,
    PlannedMove,
    PlanNumber,
    duties_of,
    planner_of,
)


def plan(term, epoch, planner=1, **more):
    return EpochPlan(PlanNumber(term, epoch), planner, **more)


def said(*last):
    return InstanceState(9, 100, last=PlanNumber(*last))


def test_the_lowest_live_instance_plans():
    assert planner_of([7, 3, 12]) == 3
    assert planner_of([]) is None


def test_a_plan_is_accepted_once_and_an_older_one_never():
    book = PlanBook(3)
    assert book.accept(plan(1, 5), 1)
    assert not book.accept(plan(1, 5), 1)
    assert not book.accept(plan(1, 4), 1)
    assert book.accept(plan(1, 6), 1)
    assert book.accepted == (1, 6)


def test_only_the_planner_is_listened_to():
    book = PlanBook(3)
    assert not book.accept(plan(1, 5, planner=2), 1)
    assert not book.accept(plan(1, 5, planner=2), None)
    assert book.accepted == (0, 0)


def test_a_planner_that_was_replaced_is_not_heard_with_its_old_term():
    book = PlanBook(3)
    assert book.accept(plan(1, 5, planner=1), 1)
    assert book.accept(plan(2, 6, planner=2), 2)  # 1 seemed dead
    assert not book.accept(plan(1, 9, planner=1), 1)  # 1 was only slow
    assert book.accept(plan(3, 10, planner=1), 1)  # and has taken over again


def test_a_plan_is_refused_that_is_older_than_what_another_has_accepted():
    """This instance was stopped while 2 planned; 1, which had been too, is back with its old plan."""
    book = PlanBook(3)
    assert book.accept(plan(1, 5), 1)
    assert not book.accept(plan(1, 6), 1, [said(1, 4), said(2, 7)])
    assert book.accepted == (1, 5)
    assert book.accept(plan(3, 8), 1, [said(1, 4), said(2, 7), said(3, 8)])


def test_the_next_number_is_above_all_that_was_accepted():
    book = PlanBook(1)
    assert book.next_number([said(0, 0)]) == (1, 1)
    book.made(PlanNumber(1, 1))
    assert book.next_number([said(0, 0), said(1, 1)]) == (1, 2)
    assert book.next_number([said(1, 7)]) == (1, 8)
    assert book.next_number([said(4, 3)]) == ((1 << 14) + 1, 4)  # another one has planned since
    other = PlanBook(2)
    assert other.next_number([said(1, 8)]) == (2, 9)  # it takes over


def test_numbers_that_cannot_be_are_those_of_strangers():
    book = PlanBook(1)
    far = PlanNumber(3, 1 << 47)
    assert book.strange({}) == set()
    assert book.strange({2: PlanNumber(1, 9), 3: PlanNumber(1, 8), 4: far}) == {4}
    assert book.strange({2: PlanNumber(1, 9), 3: PlanNumber(1 << 47, 9), 4: PlanNumber(0, 0)}) == {3}
    assert book.strange({2: far, 3: far, 4: PlanNumber(0, 0)}) == {2, 3}  # half of them: this one counts, too
    assert book.strange({2: far, 3: far, 4: far}) == set()
    assert book.strange({2: far}) == {2}
    assert book.accept(plan(1, 9), 1)
    assert book.strange({2: PlanNumber(1, 9), 4: far}) == {4}
    assert book.strange({2: PlanNumber(1, 10**9)}) == set()


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=60),
    st.randoms(use_true_random=False),
)
def test_planners_that_change_and_plans_that_come_late_never_go_back(steps, random):
    """Two instances at random times take themselves for the planner; a third hears their plans in any order."""
    books = {each: PlanBook(each) for each in (1, 2, 3)}
    published, carried = [], []
    for who, how in steps:
        if who < 3:
            seen = random.sample(sorted(books), random.randrange(4))
            states = [InstanceState(each, 100, last=books[each].accepted) for each in seen]
            number = books[who].next_number(states)
            assert number > books[who].accepted
            assert all(number != each.number for each in published if each.planner != who)
            books[who].made(number)
            published.append(EpochPlan(number, who))
            books[who].accept(published[-1], who)
        elif published:
            late = published[-1 - min(how, len(published) - 1)]
            if books[3].accept(late, random.choice([1, 2])):
                carried.append(late.number)
    assert carried == sorted(set(carried))


MOVES = (PlannedMove("a", 1, 2, 5, "kv"), PlannedMove("b", 2, 1, 5, "kv"), PlannedMove("c", 1, 3, 5, "kv"))
PLACED = (Placement("w", 1, 1), Placement("x", 1, 3), Placement("y", 2, 1))


def duties(instance, movable, waiting, live, busy=True, **more):
    return duties_of(plan(1, 1, moves=MOVES, placed=PLACED, **more), instance, movable, waiting, live, busy)


def test_each_instance_does_its_part_only():
    one = duties(1, {"a", "c"}, {"w", "x"}, {1, 2, 3})
    assert [move.request for move in one.moves] == ["a", "c"]
    assert [place.request for place in one.placed] == ["w", "x"]
    two = duties(2, {"a", "b"}, {"y"}, {1, 2, 3})
    assert [move.request for move in two.moves] == ["b"]
    assert [place.request for place in two.placed] == ["y"]
    assert duties(3, {"a", "b", "c"}, {"w"}, {1, 2, 3}) == duties(3, set(), set(), {3})


def test_what_has_ended_or_would_go_to_one_that_is_gone_is_void():
    one = duties(1, {"c"}, {"x"}, {1, 2})
    assert (one.moves, one.placed, one.void) == ((), (), 4)


def test_an_instance_ends_only_without_work():
    assert duties(1, set(), set(), {1}, busy=False, ends=(1,)).ends
    assert not duties(1, set(), set(), {1}, busy=True, ends=(1,)).ends
    assert not duties(2, set(), set(), {2}, busy=False, ends=(1,)).ends
