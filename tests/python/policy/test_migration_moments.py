"""Source or destination of one migration is killed, stopped or fenced at every moment of it, over `migration_kit`.

A moment is a message that arrives, or a turn of one of the two. Each seed has other moments; that every phase of the
protocol was among them is checked, for destinations that evict and for those that do not.

Bugs these tests are there to find: a request that ends nowhere, or in two places, or elsewhere than docs/how-to says.
"""

from __future__ import annotations

import pytest
from kit import LONG
from policy.migration_town import Town

SEEDS = range(60 if LONG else 4)
MOMENTS_MAX = 300
# What the source and the destination are when something happens to one of them: "none": the offer was not heard.
PHASES = {
    ("offered", "none"),
    ("offered", "moving"),
    ("moving", "moving"),
    ("handed", "moving"),  # the hand-over was not heard
    ("handed", "has it"),  # it was, and not all is there
    ("handed", "decoding"),
    ("released", "decoding"),
    ("gone", "decoding"),  # the source has freed its blocks
    ("gone", "released"),
}


class Moments(Town):
    """Two instances and one request, which migrates from `source` to `destination`."""

    def __init__(self, seed, way, evicting, false_proofs):
        super().__init__(seed, 0, false_proofs, instances=2, requests=1, length=60, evicting=evicting)
        (self.source,) = [one for one in self.at.values() if one.hosted]
        (self.destination,) = [one for one in self.at.values() if not one.hosted]
        for one in self.at.values():
            while evicting and len(one.memory) < one.capacity:
                one.cache_more()
        self.source.migrate("r0", self.destination, way)
        (self.leaving,) = self.source.sources
        self.arriving = None

    def moment(self):
        """The next one."""
        running = [one for one in self.at.values() if not one.is_stopped]
        if self.flight and self.dice.random() < 0.6:
            self.deliver()
        elif running:
            self.dice.choice(running).turn()
        for one in self.at.values():
            one.check()
        self.arriving = self.destination.arrivals.find(self.leaving.id) or self.arriving

    def phase(self):
        here = self.leaving.state if self.leaving in self.source.sources else "gone"
        if self.arriving is None:
            return here, "none"
        there = self.arriving.state
        return here, "has it" if there == "moving" and self.arriving.handed else there

    def is_over(self):
        return self.phase() == ("gone", "released")

    def place(self):
        """Where the request is at the end; None: it has ended with its instance."""
        self.quiet()
        self.check_ends()
        (found,) = [one.name for one in self.at.values() if "r0" in one.hosted] or [None]
        return found


def play(seed, way, evicting, happens, false_proofs=False):
    """Every moment of a migration at which something may happen; what happens in the end, with the phase it was in."""
    for at in range(MOMENTS_MAX):
        town = Moments(seed, way, evicting, false_proofs)
        for _ in range(at):
            town.moment()
        phase, is_over = town.phase(), town.is_over()
        has_it = town.arriving is not None and town.arriving.handed
        happens(town)
        yield phase, has_it, town
        if is_over:
            return
    raise AssertionError("the migration does not end")


@pytest.fixture(params=[False, True], ids=["", "evicting"])
def evicting(request):
    return request.param


def check_all(seen):
    assert seen >= PHASES, PHASES - seen


def test_a_destination_that_is_killed_loses_only_what_its_source_has_let_go(evicting):
    seen = set()
    for seed in SEEDS:
        for way in ("kv", "tokens"):

            def kill(town):
                town.kill(town.destination)
                town.start(town.destination.name, town.destination.capacity)

            for phase, _, town in play(seed, way, evicting, kill):
                seen.add(phase)
                expected = None if phase[0] in ("released", "gone") else town.source.name
                assert town.place() == expected, (seed, way, phase)
    check_all(seen)


def test_a_source_that_is_killed_loses_only_what_it_has_not_handed_over(evicting):
    seen = set()
    for seed in SEEDS:
        for way in ("kv", "tokens"):

            def kill(town):
                town.kill(town.source)
                town.start(town.source.name, town.source.capacity)

            for phase, has_it, town in play(seed, way, evicting, kill):
                seen.add(phase)
                expected = {town.destination.name} if has_it else {None}
                if phase == ("handed", "moving"):  # the hand-over may be on its way
                    expected |= {town.destination.name}
                assert town.place() in expected, (seed, way, phase)
    check_all(seen)


@pytest.mark.parametrize("who", ["source", "destination"])
@pytest.mark.parametrize("is_fenced", [False, True], ids=["stopped", "fenced"])
def test_one_that_is_stopped_for_a_while_loses_nothing(evicting, who, is_fenced):
    """Fenced: the other one has a proof that it is gone, and it wakes all the same."""
    seen = set()
    for seed in SEEDS:

        def stop(town):
            one = getattr(town, who)
            one.is_stopped = True
            for _ in range(20):
                town.moment()
            one.is_stopped = False

        for phase, _, town in play(seed, "kv", evicting, stop, is_fenced):
            seen.add(phase)
            place = town.place()
            assert place is not None
            assert is_fenced or place == town.destination.name, (seed, phase)
    check_all(seen)


def test_a_source_that_asks_for_its_request_and_dies_loses_none_that_it_has_handed_over(evicting):
    """Its last word arrives when it is known to be gone: then nobody else would have the request."""
    seen = set()
    for seed in SEEDS:

        def ask_and_die(town):
            if town.leaving in town.source.sources and not town.leaving.ended:
                town.leaving.cancel("cancelled")
                town.leaving.withdraw()
                town.send(town.destination.number, town.leaving.says())
            town.kill(town.source)
            town.start(town.source.name, town.source.capacity)

        for phase, has_it, town in play(seed, "kv", evicting, ask_and_die):
            seen.add(phase)
            expected = {town.destination.name} if has_it else {None}
            if phase == ("handed", "moving"):
                expected |= {town.destination.name}
            assert town.place() in expected, (seed, phase)
    check_all(seen)
