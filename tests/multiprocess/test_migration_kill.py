"""SIGKILL and SIGSTOP of the source or the destination of a live migration, at every phase.

Bugs these tests are there to find: a request that decodes in two places, or in none; other tokens than without
migration; blocks of a request that has gone, or never came, that nobody frees; a destination that is taken for dead
because it is silent.
"""

from __future__ import annotations

import threading
import time

import pytest
from control.migration_kit import Place, prompt_of, reference
from crew import near_nursery
from victims import eventually

import kvpool
from kvpool.policy.migration import Term

__all__ = ["near_nursery"]

PROMPT, LENGTH = 41, 200
SLOW = 50 * 4 * 4 * 2 * 2 * 2 * 4  # bytes a second: the first round of ten blocks takes a fifth of one
LONG_LEASE, SHORT_LEASE = 60.0, 2.0

BEGIN = """
from control.migration_kit import *
from kvpool.control.migration import Timing

class Telling:
    def put(self, *said):
        tell(said)

place = Place("victim", Telling(), settings={"lease_s": lease}, bytes_per_s=slow)

def hold_at(phase, seconds):
    def hook(*_):
        del place.engine.before[phase]
        tell("at")
        time.sleep(seconds)

    place.engine.before[phase] = hook

place.engine.run(0.01)
place.pool.peers.connect(where)
place.address
"""


class Scene:
    """The survivor in this process, and a victim; what both put out is checked token by token."""

    def __init__(self, nursery, lease=LONG_LEASE, **options):
        self.here = Place("survivor", self, settings={"lease_s": lease}, **options)
        self.nursery, self.lease = nursery, lease
        self.victims = []
        self.prompt = prompt_of(1, PROMPT)
        self.expected = reference(self.prompt, LENGTH)
        self.by = {}
        self.victim = self.begin()

    def begin(self):
        victim = self.nursery.spawn()
        self.victims.append(victim)
        victim(BEGIN, lease=self.lease, slow=SLOW, where=self.here.address)
        eventually(lambda: any(peer.name == "victim" for peer in self.here.pool.peers))
        return victim

    def hear(self, said):
        if said == "begun":
            return
        self.put(*said)

    def put(self, request, term, position, token, engine):
        """One of the two has put out a token."""
        assert token == self.expected[PROMPT + position], f"token {position} is wrong"
        assert self.by.setdefault((request, term), engine) == engine, "it runs twice in one term"

    def await_phase(self):
        while (said := self.victim.answer()) != "at":
            self.hear(said)

    def ask(self, code):
        """What the victim answers, past what it has put out."""
        self.victim.send(code)
        while (said := self.victim.answer()) == "begun" or (isinstance(said, tuple) and len(said) == 5):
            self.hear(said)
        return said

    def check_here(self):
        """It decodes here, with the tokens of a run without migration, and everything is freed."""
        assert self.here.engine.finish("r") == self.expected
        eventually(lambda: self.here.migrations.arriving() == ())
        self.here.check_empty()

    def check_there(self):
        self.ask("place.engine.end()\nNone")
        assert self.ask("len(place.engine.requests['r'].tokens)") < LENGTH
        assert self.ask("place.engine.finish('r')") == self.expected
        eventually(lambda: self.ask("list(place.migrations.arriving())") == [])
        self.ask("place.check_empty()\nNone")
        assert "r" not in self.here.engine.requests
        self.here.check_empty()

    def close(self):
        for victim in self.victims:
            victim.close()
        self.here.close()


@pytest.fixture
def scene(near_nursery):
    one = Scene(near_nursery, bytes_per_s=SLOW)
    yield one
    one.close()


def hold(scene, phase, seconds):
    """The victim waits at this phase; in the middle of fetches nothing has to hold it up."""
    if phase not in ("fetching", "last blocks", "handed"):
        scene.ask(f"hold_at({phase!r}, {seconds})\nNone")


def send_there(scene, phase, by, seconds=30.0):
    """Begins to migrate to the victim, and returns when it is at the phase."""
    hold(scene, phase, seconds)
    scene.here.engine.begin("r", scene.prompt, LENGTH)
    scene.here.engine.run(0.01)
    moving = scene.here.migrations.migrate("r", "victim", by=by)
    if phase == "fetching":
        time.sleep(0.04)
    else:
        scene.await_phase()
    return moving


TO_VICTIM = [("admit", "tokens"), ("prefill", "tokens"), ("fetching", "kv"), ("adopt", "kv"), ("adopted", "kv")]


@pytest.mark.parametrize(("phase", "by"), TO_VICTIM)
def test_a_request_goes_on_at_its_source_when_its_destination_is_killed(scene, phase, by):
    moving = send_there(scene, phase, by)
    scene.victim.kill()
    with pytest.raises(kvpool.PeerLost):
        moving.wait(30)
    assert moving.state == "here"
    assert scene.here.engine.requests["r"].term.number == (2 if phase.startswith("adopt") else 0)
    scene.victim = scene.begin()  # of the same name: another incarnation, to which nothing was sent
    assert scene.ask("len(place.engine.requests)") == 0
    scene.check_here()


@pytest.mark.parametrize(("phase", "by"), TO_VICTIM)
def test_a_request_arrives_when_its_destination_was_stopped_for_a_while(scene, phase, by):
    moving = send_there(scene, phase, by, 0.1)
    scene.victim.stop()
    time.sleep(0.3)
    assert not moving.done() or phase == "adopted"
    scene.victim.wake()
    moving.wait(30)
    assert moving.state == "there"
    scene.check_there()


def come_here(scene, phase, seconds=30.0):
    """The victim migrates its request to here; returns when it is at the phase."""
    hold(scene, phase, seconds)
    reached, go, fetch = [], threading.Event(), scene.here.pool.fetch
    if phase == "last blocks":

        def fetch_later(*args, priority, **named):
            if priority == "decode":
                reached.append(1)
                go.wait(20)
            return fetch(*args, priority=priority, **named)

        scene.here.pool.fetch = fetch_later
    else:
        scene.here.engine.before["adopt"] = lambda _: (reached.append(1), time.sleep(0.3))
    scene.ask(f"place.engine.begin('r', prompt_of(1, {PROMPT}), {LENGTH})\nNone")
    scene.victim.send("moving = place.migrations.migrate('r', 'survivor', by='kv')\n'begun'")
    if phase in ("handed", "last blocks"):
        eventually(lambda: reached)
    elif phase == "fetching":
        time.sleep(0.04)
    else:
        scene.await_phase()
    return go


FROM_VICTIM = ["stop", "fetching", "last blocks", "handed", "release"]


@pytest.mark.parametrize("phase", FROM_VICTIM)
def test_a_source_that_is_killed_leaves_its_request_where_it_was_handed_over_to(scene, phase):
    go = come_here(scene, phase)
    scene.victim.kill()
    go.set()
    if phase in ("last blocks", "handed", "release"):
        eventually(lambda: "r" in scene.here.engine.requests)
        assert scene.here.engine.requests["r"].term.number == 1
        scene.check_here()
        assert not scene.here.migrations._incoming._arrivals.holds_back("r")
    else:
        eventually(lambda: scene.here.migrations.arriving() == ())
        assert not scene.here.engine.requests
        eventually(lambda: scene.here.pool.audit().hbm.active == 0)
        eventually(lambda: scene.here.pool.audit().hbm.quarantined == 0)
        scene.here.check_empty()


@pytest.mark.parametrize("phase", FROM_VICTIM)
def test_a_request_arrives_when_its_source_was_stopped_for_a_while(scene, phase):
    go = come_here(scene, phase, 0.1)
    scene.victim.stop()
    time.sleep(0.3)
    scene.victim.wake()
    go.set()
    eventually(lambda: "r" in scene.here.engine.requests)
    assert len(scene.here.engine.requests["r"].tokens) < LENGTH
    scene.check_here()
    assert scene.ask("moving.wait(30)\nmoving.state") == "there"
    eventually(lambda: scene.ask("len(place.engine.requests)") == 0)
    scene.ask("place.check_empty()\nNone")


def await_lost(scene):
    eventually(lambda: not list(scene.here.pool.peers))


def test_a_silent_destination_may_have_the_request_until_it_is_heard_again(near_nursery):
    """Its link is lost, and nothing proves that it has ended: the source keeps the blocks and does not decode."""
    scene = Scene(near_nursery, SHORT_LEASE)
    try:
        scene.ask("hold_at('adopted', 0.1)\nNone")
        scene.here.engine.begin("r", scene.prompt, LENGTH)
        moving = scene.here.migrations.migrate("r", "victim", timeout=4)
        scene.await_phase()
        scene.victim.stop()
        await_lost(scene)
        with pytest.raises(kvpool.DeadlineExceeded):
            moving.wait(30)
        assert moving.state == "handed over"
        assert not scene.here.engine.step("r")
        scene.victim.wake()
        scene.ask(f"place.pool.peers.connect({scene.here.address!r})\nNone")
        eventually(lambda: moving.state == "there")
        eventually(lambda: "r" not in scene.here.engine.requests)
        scene.check_there()
    finally:
        scene.close()


def test_a_destination_that_was_fenced_drops_the_request_when_it_wakes(near_nursery):
    """The source has taken it back, in a higher term; the reader hears no more of the old one."""
    fenced = []
    scene = Scene(near_nursery, SHORT_LEASE, gone=lambda name, incarnation: "fenced" if fenced else None)
    try:
        scene.ask("hold_at('adopted', 0.1)\nNone")
        scene.here.engine.begin("r", scene.prompt, LENGTH)
        moving = scene.here.migrations.migrate("r", "victim")
        scene.await_phase()
        scene.victim.stop()
        await_lost(scene)
        fenced.append(True)
        with pytest.raises(kvpool.PeerLost):
            moving.wait(30)
        assert moving.state == "here"
        assert scene.here.engine.requests["r"].term == Term(2, scene.here.pool._incarnation())
        assert scene.here.engine.step("r")
        scene.victim.wake()
        scene.ask(f"place.pool.peers.connect({scene.here.address!r})\nNone")
        eventually(lambda: scene.ask("len(place.engine.requests)") == 0)
        scene.ask("place.check_empty()\nNone")
        scene.check_here()
    finally:
        scene.close()
