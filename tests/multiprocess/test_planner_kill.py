"""SIGKILL and SIGSTOP of the member that plans, at every phase of an epoch; and two planners at once after that.

Over the files of one machine and over etcd. Members that evict all along are tested where a plan was told: before that
no request moves, so that no member evicts for one, and a planner holds no block of a request that others move.

Bugs these tests are there to find: an epoch that waits for a planner that is gone; a plan that is carried out twice, or
after a newer one of the member that took over; a request that such a plan loses, or lets run in two places.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from cluster.places import etcd, etcd_server, local, place
from planning import EPOCH_S
from town import PHASES, Town, eventually, planning_nursery

__all__ = ["etcd", "etcd_server", "local", "place", "planning_nursery"]


@pytest.fixture
def town(planning_nursery, tmp_path, place) -> Iterator[Town]:
    one = Town(planning_nursery, tmp_path, place)
    yield one
    one.close()


# Phases, and whether all members evict meanwhile.
EVICTING = [*((phase, False) for phase in PHASES), ("told", True)]


@pytest.mark.parametrize(("phase", "evicting"), EVICTING)
def test_another_member_plans_when_the_planner_is_killed(town, phase, evicting):
    town.begin("bcd", evicting)
    town.bring_to(phase)
    town.members["a"].kill()
    town.go("d")
    town.await_another_planner()
    town.finish("bcd", "bcd")
    # What a dead planner has told is there until its lease is over: d, which reads it now, may be early enough.
    heard, perhaps = ("bc", "d") if phase == "told" else ("", "")
    for name in "bcd":
        if name not in perhaps:
            assert any(number in town.made("a") for number in town.accepted(name)) == (name in heard)


@pytest.mark.parametrize(("phase", "evicting"), EVICTING)
def test_the_epoch_goes_on_when_the_planner_was_stopped_for_a_while(town, phase, evicting):
    town.begin("abcd", evicting)
    town.bring_to(phase)
    town.members["a"].stop()
    time.sleep(2.5 * EPOCH_S)
    town.members["a"].wake()
    for name in "ad":
        town.go(name)
    town.finish("abcd")


@pytest.mark.parametrize("phase", PHASES)
def test_the_plan_of_a_planner_that_was_replaced_is_refused_when_it_wakes(town, phase):
    """Two plan at once; the one that was stopped begins where it was."""
    town.begin("abcd")
    town.bring_to(phase)
    old = town.made("a")
    town.members["a"].stop()
    town.await_another_planner()
    newer = min(number for number in town.accepted("c") if number in town.planned("b"))
    accepted = len(town.notes.all("accepted"))
    town.members["a"].wake()
    eventually(lambda: town.ask("d", "[each.name for each in member.cluster.members()]") == list("abcd"))
    if phase == "told":  # what a had published is there again; d has heard neither plan
        town.go("d")
        town.await_note("refused", "d", old[0])
    town.go("a")
    eventually(lambda: any(number[0] > newer[0] for number in town.accepted("d")))  # a plans again
    town.finish("abcd")
    late = [number for _, _, number, _ in town.notes.all("accepted")[accepted:]]
    assert all(number > newer or number in town.planned("b") for number in late)
