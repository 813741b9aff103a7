"""The load cap, newcomers, and the table that counts load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.fleet import Fleet, prompt

from kvpool.policy import routing
from kvpool.policy.routing import Balance, LeastLoad, LongestPrefix


def test_a_hot_prefix_does_not_drown_one_instance():
    """100 prompts that all begin with a prefix of instance 1."""

    def served(cap):
        fleet = Fleet(4, policy=LongestPrefix(), balance=Balance(cap=cap, idle=0, warmup_s=0, half_life_s=1e6))
        fleet.hold(1, prompt(20))
        work = dict.fromkeys(range(1, 5), 0.0)
        for number in range(100):
            decision = fleet.serve(prompt(25, fork=20, fork_name=100 + number))
            work[decision.instance] += decision.exec_s
        return np.array(list(work.values()))

    assert served(float("inf")).tolist() == [2000.0, 0, 0, 0]
    work = served(1.5)
    assert work.max() <= 1.5 * work.mean() + 2 * 100  # a prompt of slack, and the one that reached the limit
    assert (work > 0).sum() >= 3  # 1.5 times the mean is what three of four have


def test_a_newcomer_gets_work_gradually():
    def shares(warmup_s):
        fleet = Fleet(
            4, balance=Balance(cap=1.2, idle=0, warmup_s=warmup_s, slack=0.5, half_life_s=40), policy=LeastLoad()
        )
        fleet.now += 10_000
        counts = []
        for second in range(400):
            if second == 200:
                fleet.scheduler.add_instance(9)
            counts.append(fleet.serve(prompt(1, name=second)).instance == 9)
            fleet.now += 1
        return [sum(counts[start : start + 20]) for start in (200, 240, 300, 380)]

    eager, gradual = shares(0), shares(100)
    assert eager[0] >= 10  # nearly all that comes, until it has done as much lately as the others
    assert all(3 <= count <= 5 for count in gradual)  # about its fifth from the start


def worked(fleet, instance, seconds):
    """The instance has just done so much."""
    table = fleet.scheduler._prefill
    table.finish(instance, table.assign(table.slot(instance), seconds, fleet.now), fleet.now)


def test_an_instance_that_is_resumed_does_not_lock_out_the_one_that_worked_meanwhile():
    """It has done nothing lately, so the mean is small. It is busy for 200 s, the other one for half a second."""
    fleet = Fleet(2, balance=Balance(warmup_s=0))
    fleet.scheduler.drain(1)
    fleet.now += 40.0
    worked(fleet, 2, 900.0)
    fleet.scheduler.resume(1)
    table = fleet.scheduler._prefill
    for instance, seconds in ((1, 200.0), (2, 0.5)):
        table.assign(table.slot(instance), seconds, fleet.now)
    decision = fleet.route(prompt(10))
    assert (decision.instance, decision.queue_s) == (2, 0.5)


def test_an_instance_that_has_warmed_up_does_not_lock_out_the_others():
    fleet = Fleet(1, balance=Balance())
    fleet.now += 1000.0
    worked(fleet, 1, 900.0)
    fleet.scheduler.add_instance(2)
    fleet.now += 60.0
    fleet.serve(prompt(1))
    table = fleet.scheduler._prefill
    for instance, seconds in ((1, 0.5), (2, 200.0)):
        table.assign(table.slot(instance), seconds, fleet.now)
    assert fleet.route(prompt(10)).instance == 1


def test_who_comes_back_counts_as_the_middle_one_of_the_others_by_capacity():
    table = routing.load.LoadTable(Balance(half_life_s=10.0, warmup_s=0), drains=True)
    for instance, (capacity, seconds) in enumerate([(1.0, 2.0), (1.0, 4.0), (2.0, 16.0), (2.0, 0.0), (1.0, 50.0)]):
        table.add(instance, 0.0, capacity)
        table.finish(instance, table.assign(instance, seconds, 0.0), 0.0)
    for instance in (3, 4):
        table.set_open(instance, False, -2.5)
        table.set_open(instance, True, 0.0)
    assert table.load(0.0).tolist() == [4.0, 8.0, 16.0, 8.0, 100.0]  # by share: the largest capacity is 2
    assert table.limit(0.0, 0.0) == pytest.approx(1.2 * (2 + 4 + 16 + 8 + 50) / 3.5)


def test_who_was_away_for_a_moment_counts_as_before():
    """A router takes an instance out for one decision, when it has just failed the request, say."""
    table = routing.load.LoadTable(Balance(half_life_s=10.0, warmup_s=0), drains=True)
    for instance, seconds in enumerate([10.0, 10.0, 0.0]):
        table.add(instance, 0.0)
        table.finish(instance, table.assign(instance, seconds, 0.0), 0.0)
    before = table.load(0.0).tolist()
    for _ in range(3):
        table.set_open(2, False, 0.0)
        table.set_open(2, True, 0.0)
    assert table.load(0.0).tolist() == before == [10.0, 10.0, 0.0]


def test_a_fleet_that_starts_together_has_no_newcomers():
    """All shares are alike, so locality and slack are as in a fleet that has been there for long."""

    def chosen(warmup_s):
        balance = Balance(cap=1.0, slack=2.0, idle=0, warmup_s=warmup_s, half_life_s=30.0)
        fleet = Fleet(3, balance=balance, policy=LongestPrefix())
        return [fleet.serve(prompt(2)).instance for _ in range(40)]

    # 8 s, then 1 s each, while the load is at most a third of it and 2 * 8 s: until it is 25 s.
    assert chosen(100.0) == chosen(0.0)
    assert chosen(100.0)[:19] == [1] * 18 + [2]


def test_where_hardly_anything_is_done_prompts_stay_together():
    """A hot prefix at a tenth of what one instance can do: no reason to spread it."""

    def instances(seconds):
        fleet = Fleet(4, policy=LongestPrefix(), balance=Balance(cap=1.2, idle=0.2, slack=0, warmup_s=0))
        chosen = []
        for _ in range(100):
            chosen.append(fleet.serve(prompt(2)).instance)
            fleet.now += seconds
        return set(chosen)

    assert instances(seconds=10.0) == {1}
    assert len(instances(seconds=0.5)) > 1


def test_capacity_counts_in_the_share():
    fleet = Fleet(0, policy=LongestPrefix(), balance=Balance(cap=1.0, slack=0.0, idle=0, warmup_s=0, half_life_s=1e9))
    fleet.scheduler.add_instance(1, capacity=3.0)
    fleet.scheduler.add_instance(2)
    counts = [fleet.serve(prompt(1, name=name)).instance for name in range(400)]
    assert counts.count(1) == pytest.approx(300, abs=2)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.5, 4), st.floats(0, 200), st.booleans()), min_size=1, max_size=12
    ),
    st.floats(1, 3),
)
def test_there_is_always_an_open_instance_and_none_above_the_cap(instances, cap):
    """(load, capacity, age, open) of each."""
    table = routing.load.LoadTable(Balance(cap=cap, slack=0.0, idle=0, warmup_s=100.0), drains=True)
    for number, (work, capacity, age, is_open) in enumerate(instances):
        table.add(number, 1000.0 - age, capacity)
        table.assign(number, work, 1000.0)
        table.set_open(number, is_open, 1000.0)
    load = table.load(1000.0)
    may = table.may_get_more(load, 1000.0, 1.0)
    opened = [at for at, (_, _, _, is_open) in enumerate(instances) if is_open]
    assert may.any() == bool(opened)
    shares = [capacity * min(1.0, max(0.1, age / 100)) for _, capacity, age, _ in instances]
    if all(age >= 100 and capacity == 1 for _, capacity, age, _ in instances):
        assert (load == [work for work, *_ in instances]).all()
    shares = [share / max(shares) for share in shares]
    for at in opened:
        mean = sum(instances[other][0] for other in opened) / sum(shares[other] for other in opened)
        assert load[at] == pytest.approx(instances[at][0] / shares[at])
        if may[at] and load[at] > load[opened].min():
            assert load[at] <= cap * mean * (1 + 1e-9)
    assert not any(may[at] for at in range(len(instances)) if at not in opened)


def test_done_work_fades():
    table = routing.load.LoadTable(Balance(half_life_s=10.0, warmup_s=0), drains=True)
    table.add(3, 0.0)
    number = table.assign(0, 8.0, 0.0)
    assert table.load(100.0).tolist() == [8.0]  # not done: it does not fade
    table.finish(3, number, 100.0)
    assert [float(table.load(now)[0]) for now in (100.0, 110.0, 130.0)] == [8.0, 4.0, 1.0]
    cancelled = table.assign(0, 8.0, 130.0)
    table.finish(3, cancelled, 130.0, done=False)
    table.finish(3, cancelled, 130.0)
    assert table.load(130.0).tolist() == [1.0]


def test_the_limit_is_the_same_after_a_long_time():
    """Work that was done is counted anew after 64 half-lives, here while work ends; sums are those of the arrays."""
    table = routing.load.LoadTable(Balance(cap=2.0, slack=0.0, idle=0, half_life_s=10.0, warmup_s=0), drains=True)
    for instance in range(3):
        table.add(instance, 0.0)
    first, second = table.assign(0, 8.0, 0.0), table.assign(1, 6.0, 0.0)
    table.finish(0, first, 1000.0)
    assert table.limit(1000.0, 0.0) == pytest.approx(2 * (8 + 6) / 3)
    table.finish(1, second, 2000.0)
    assert table.limit(2000.0, 0.0) == pytest.approx(2 * 6 / 3)
    assert table.load(2000.0).tolist() == pytest.approx([0, 6, 0])
