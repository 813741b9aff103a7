"""SIGKILL and SIGSTOP of the member that plans, at every phase of an epoch; and two planners at once after that.

Over the files of one machine and over etcd. Members that evict all along are tested where a plan was told: before that
no request moves, so that no member evicts for one, and a planner holds no block of a request that others move.

Bugs these tests are there to find: an epoch that waits for a planner that is gone; a plan that is carried out twice, or
after a newer one of the member that took over; a request that such a plan loses, or lets run in two places.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import pytest
from cluster.places import etcd, etcd_server, local, place
from planning import EPOCH_S, Notes, check_notes
from transfer.kit import eventually as eventually_within
from victims import Nursery

import kvpool

__all__ = ["etcd", "etcd_server", "local", "place"]

# A member that a busy machine does not run for so long is lost to the others, and a step that takes half of it makes no
# plan. Only what waits for the loss of a member that is stopped takes longer with it.
LEASE = 12.0
eventually = functools.partial(eventually_within, seconds=150)
# The states of all are read; the plan is made, and nobody has heard of it; all but `d` have.
PHASES = {"collected": "collected", "made": "made", "told": "to be told"}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    one = Nursery(modules="planning")
    yield one
    one.close()


class Town:
    """Four members: `a` plans, `b` is the next. Each has the request of its name, or some do."""

    def __init__(self, nursery, path, place):
        self.place = place
        self.cluster = kvpool.Cluster.join(self.place.url, lease=LEASE)
        self.notes = Notes(str(path / "notes"))
        self.members = {}
        for name in "abcd":
            self.members[name] = victim = nursery.spawn()
            victim(
                "from planning import *\nmember = Member(name, url, path, lease)\nNone",
                name=name, url=self.place.url, path=self.notes.path, lease=LEASE,
            )  # fmt: skip

    def ask(self, name, code):
        return self.members[name](code)

    def begin(self, requests, evicting=False):
        """They run, all say so, and from then on plans may move them."""
        for name in requests:
            self.ask(name, "member.begin()\nNone")
        for name in "abcd" if evicting else "":
            self.ask(name, "member.evicting.begin()\nNone")
        eventually(lambda: self.shown() == sorted(requests))
        for name in "bcd":
            self.ask(name, "member.be_ready()\nNone")

    def shown(self):
        found = [each.rebalancing.get("state", {"r": ()})["r"] for each in self.cluster.members()]
        return sorted(row[0] for rows in found for row in rows) if len(found) == 4 else None

    def bring_to(self, phase):
        """The planner is there, and waits."""
        if phase == "told":
            self.pause("d", "looks", "looks")
        self.ask("a", f"member.pause.at({PHASES[phase]!r})\nmember.be_ready()\nNone")
        self.await_note("at", "a", phase)
        if phase == "told":
            ((*_, number),) = self.notes.all("made")
            for name in "bc":
                eventually(lambda name=name: number in self.accepted(name))

    def pause(self, name, at, phase):
        self.ask(name, f"member.pause.at({at!r})\nNone")
        self.await_note("at", name, phase)

    def go(self, name):
        self.ask(name, "member.pause.go()\nNone")

    def await_note(self, *what):
        eventually(lambda: list(what) in self.notes.all(what[0]))

    def made(self, name):
        return [number for _, who, number in self.notes.all("made") if who == name]

    def accepted(self, *names):
        return [number for _, who, number, _ in self.notes.all("accepted") if who in names]

    def await_another_planner(self):
        """`b` plans, and is followed."""
        eventually(lambda: self.made("b"))
        eventually(lambda: any(number in self.made("b") for number in self.accepted("c")))
        assert self.ask("b", "member.rebalancer.totals().takeovers") >= 1

    def finish(self, requests, names="abcd"):
        """All come together, end, and leave nothing behind."""
        eventually(lambda: sorted(self.where(names), key=len)[-1] == sorted(requests))
        for name in names:
            self.ask(name, "member.engine.may_end = True")
        for name in names:
            self.ask(name, "member.check_empty()\nNone")
        check_notes(self.notes, requests)

    def where(self, names):
        return [self.ask(name, "sorted(member.engine.requests)") for name in names]

    def close(self):
        for victim in self.members.values():
            victim.close()
        self.cluster.close()


@pytest.fixture
def town(nursery, tmp_path, place) -> Iterator[Town]:
    one = Town(nursery, tmp_path, place)
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
    newer = min(number for number in town.accepted("c") if number in town.made("b"))
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
    assert all(number > newer or number in town.made("b") for number in late)
