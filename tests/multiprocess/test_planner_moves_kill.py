"""SIGKILL of the member that plans while a request leaves it, or comes to it, as it has planned.

Bugs these tests are there to find: a request that is decoded nowhere, or in two places, because the member that planned
its move had a part in it; a next planner that waits for that move, or takes what has gone for what is on its way.
"""

from __future__ import annotations

import pytest
from cluster.places import local
from town import Town, eventually, planning_nursery

__all__ = ["local", "planning_nursery"]


@pytest.fixture
def town(planning_nursery, tmp_path, local):
    one = Town(planning_nursery, tmp_path, local)
    yield one
    one.close()


def kill_at(town, holder, phase):
    """The planner is killed when the move is at this phase, in a call at this member."""
    town.ask(holder, f"member.hold_at({phase!r})\nNone")
    town.ask("a", "member.be_ready()\nNone")
    town.await_note("at", holder, phase)
    town.members["a"].kill()
    if holder != "a":
        town.go(holder)
    eventually(lambda: town.ask("b", "member.rebalancer.plans"))


# Where the request of `a` is held up on its way to `b`, and whether it has been handed over by then.
LEAVES = [
    ("a", "progress", False),
    ("b", "admit", False),
    ("b", "background", False),
    ("a", "stopping", False),
    ("b", "decode", True),
    ("b", "adopt", True),
    ("b", "adopted", True),
    ("a", "release", True),
]


@pytest.mark.parametrize(("holder", "phase", "arrives"), LEAVES, ids=[phase for _, phase, _ in LEAVES])
def test_a_request_of_the_planner_is_where_it_was_handed_over_to_or_ends_with_it(town, holder, phase, arrives):
    town.begin("ab")
    kill_at(town, holder, phase)
    town.finish("ab" if arrives else "b", "bcd")


# Where the request of `c` is held up on its way to the planner, and whether `c` has let it go by then.
COMES = [
    ("c", "progress", False),
    ("a", "admit", False),
    ("a", "background", False),
    ("c", "stopping", False),
    ("a", "decode", False),
    ("a", "adopt", False),
    ("a", "adopted", False),
    ("c", "release", True),
]


@pytest.mark.parametrize(("holder", "phase", "gone"), COMES, ids=[phase for _, phase, _ in COMES])
def test_a_request_on_its_way_to_the_planner_goes_on_or_ends_with_it_once_it_was_let_go(town, holder, phase, gone):
    town.begin("bc", at={"b": "a"})
    kill_at(town, holder, phase)
    town.finish("" if gone else "c", "bcd")
