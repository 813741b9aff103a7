"""Four members whose requests plans move, each in its own process, and what all of them have noted."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from planning import Notes, check_notes
from transfer.kit import eventually as eventually_within
from victims import Nursery

import kvpool

__all__ = ["LEASE", "PHASES", "Town", "eventually", "planning_nursery"]

# A member that a busy machine does not run for so long is lost to the others, and a step that takes half of it makes no
# plan. Only what waits for the loss of a member that is stopped takes longer with it.
LEASE = 12.0
eventually = functools.partial(eventually_within, seconds=150)
# The states of all are read; the plan is made, and nobody has heard of it; all but `d` have.
PHASES = {"collected": "collected", "made": "made", "told": "to be told"}


@pytest.fixture(scope="module")
def planning_nursery() -> Iterator[Nursery]:
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

    def begin(self, requests, evicting=False, at=None):
        """They run, all say so, and from then on plans may move them.

        Each begins at the member of its name, or where `at` says.
        """
        for name in requests:
            self.ask((at or {}).get(name, name), f"member.begin({name!r})\nNone")
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

    def planned(self, name):
        return [number for _, who, number in self.notes.all("planned") if who == name]

    def made(self, name):
        return [number for _, who, number in self.notes.all("made") if who == name]

    def accepted(self, *names):
        return [number for _, who, number, _ in self.notes.all("accepted") if who in names]

    def await_another_planner(self):
        """`b` plans, and is followed. What the dead planner has told may have left it nothing to move."""
        eventually(lambda: any(number in self.planned("b") for number in self.accepted("c")))
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
