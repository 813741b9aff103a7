"""The policies of Table 6 and eq. 1 of MemServe, by examples worked by hand."""

from __future__ import annotations

import numpy as np
from policy.fleet import BLOCK, Fleet, UnitModel, prompt

from kvpool.policy.routing import LeastLoad, LongestPrefix, QueuePlusExec, SessionId


def test_least_load_does_not_care_who_holds_the_prompt():
    fleet = Fleet(3, policy=LeastLoad())
    fleet.hold(2, prompt(10))
    assert [fleet.route(prompt(10)).instance for _ in range(3)] == [1, 2, 3]
    assert fleet.route(prompt(1)).instance == 2  # it holds all but one token: the shortest queue


def test_longest_prefix_chooses_the_instance_with_the_most_cached_tokens():
    fleet = Fleet(3, policy=LongestPrefix())
    fleet.hold(2, prompt(6))
    fleet.hold(3, prompt(8))
    decision = fleet.route(prompt(10))
    assert (decision.instance, decision.cached, decision.exec_s) == (3, 8 * BLOCK, 2 * BLOCK)
    assert fleet.route(prompt(6)).instance == 2  # of equals, the one that is free first
    assert fleet.route(prompt(3, name=9)).instance == 1


def test_equation_1_by_hand():
    """Instance 1 holds 6 of 10 blocks and has 30 s of work; 2 is idle and holds none; 3 holds 2 and has 5 s of work."""
    fleet = Fleet(3, policy=QueuePlusExec())
    table = fleet.scheduler._prefill
    fleet.hold(1, prompt(6))
    fleet.hold(3, prompt(2))
    table.assign(table.slot(1), 30.0, fleet.now)
    table.assign(table.slot(3), 5.0, fleet.now)
    # 1: 30 + 16; 2: 0 + 40; 3: 5 + 32
    first = fleet.route(prompt(10))
    assert (first.instance, first.queue_s, first.exec_s) == (3, 5.0, 32.0)
    # 1: 30 + 16; 2: 0 + 40; 3: 37 + 32
    second = fleet.route(prompt(10))
    assert (second.instance, second.queue_s, second.exec_s) == (2, 0.0, 40.0)
    # 1: 30 + 16; 2: 40 + 40; 3: 37 + 32
    assert fleet.route(prompt(10)).instance == 1
    assert [fleet.scheduler.backlog_s(instance) for instance in (1, 2, 3)] == [46.0, 40.0, 37.0]


def test_thrift_waits_for_cached_tokens_rather_than_compute_them_again():
    """Instance 1 holds 36 of 40 tokens and has 38 s of work: 42 s there, 40 s elsewhere, 36 of them wasted."""
    chosen = []
    for thrift in (0.0, 0.05, 0.1):
        fleet = Fleet(2, policy=QueuePlusExec(thrift))
        fleet.hold(1, prompt(9))
        fleet.scheduler._prefill.assign(fleet.scheduler._prefill.slot(1), 38.0, fleet.now)
        fleet.scheduler._prefill.assign(fleet.scheduler._prefill.slot(2), 0.125, fleet.now)  # no instance is idle
        chosen.append(fleet.route(prompt(10)).instance)
    assert chosen == [2, 2, 1]  # 38 + 1.1 * 4 = 42.4 against 44.125


def test_a_queue_shrinks_over_time_and_never_below_the_requests_behind_its_head():
    fleet = Fleet(1)
    first, second = fleet.route(prompt(5)), fleet.route(prompt(2))
    fleet.now += 12
    assert fleet.scheduler.backlog_s(1) == 28 - 12
    fleet.now += 50  # the head takes longer than predicted
    assert fleet.scheduler.backlog_s(1) == 8
    fleet.scheduler.first_token(first.ticket)
    assert fleet.scheduler.backlog_s(1) == 8
    fleet.now += 3
    assert fleet.scheduler.backlog_s(1) == 5
    fleet.scheduler.first_token(second.ticket)
    fleet.scheduler.first_token(second.ticket)  # once is enough
    assert fleet.scheduler.backlog_s(1) == 0


def test_a_session_stays_where_it_began():
    fleet = Fleet(3, policy=SessionId())
    homes = {session: fleet.serve(prompt(3, name=at), session).instance for at, session in enumerate("abc", 1)}
    assert sorted(homes.values()) == [1, 2, 3]
    fleet.hold(1, prompt(9, name=8))
    for session, home in homes.items():
        assert fleet.route(prompt(9, name=8), session).instance == home
    fleet.scheduler.remove_instance(homes["b"])
    assert fleet.route(prompt(1), "b").instance != homes["b"]
    assert fleet.route(prompt(1), "a").instance == homes["a"]


def test_sessions_that_are_forgotten_reset():
    fleet = Fleet(2, policy=SessionId(sessions_max=1))
    fleet.route(prompt(5), "a")
    fleet.route(prompt(1), "b")
    fleet.route(prompt(9), "c")
    assert fleet.route(prompt(1), "a").instance == 1  # 5 blocks wait there, 10 at the other one


def test_hashed_sessions_move_only_when_their_instance_leaves():
    fleet = Fleet(8, policy=SessionId(first="hash"))
    homes = {f"session {i}": fleet.serve(prompt(1), f"session {i}").instance for i in range(200)}
    assert set(homes.values()) == set(range(1, 9))
    again = Fleet(8, policy=SessionId(first="hash"))
    again.scheduler.remove_instance(3)
    for session, home in homes.items():
        moved = again.serve(prompt(1), session).instance
        assert moved == home if home != 3 else moved != 3


def test_a_request_without_a_session_goes_to_the_least_loaded():
    fleet = Fleet(2, policy=SessionId())
    assert [fleet.route(prompt(1)).instance for _ in range(4)] == [1, 2, 1, 2]


def test_an_idle_fleet_shares_its_requests():
    for policy in (LeastLoad(), LongestPrefix(), QueuePlusExec()):
        fleet = Fleet(4, policy=policy)
        assert {fleet.serve(prompt(1, name=at)).instance for at in range(4)} == {1, 2, 3, 4}


def test_the_unit_model_is_a_cost_model():
    """So that the figures above are meaningful."""
    model = UnitModel()
    assert (
        model.exec_many_s(10, np.array([0, 4, 10])).tolist() == [model.exec_s(10, c) for c in (0, 4, 10)] == [10, 6, 1]
    )
