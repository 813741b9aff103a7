"""A live migration between this process and a victim, and how both are brought to each phase of it, by events."""

from __future__ import annotations

import threading

from control.migration_kit import Place, prompt_of, reference
from holding import Evicting, hold_behind, stop_within_a_block
from victims import eventually

__all__ = ["LENGTH", "PROMPT", "SLOW", "Hold", "Scene", "come_here", "send_there"]

PROMPT, LENGTH = 41, 200
SLOW = 50 * 4 * 4 * 2 * 2 * 2 * 4  # bytes a second: the first round of ten blocks takes a fifth of one, in pieces
LONG_LEASE = 60.0
# Calls of the engine at which the survivor is held up, where it is the destination.
HELD_HERE = {"admit": "admit", "prefill": "prefill", "handed": "adopt", "adopted": "adopted"}
HERE_AS_SOURCE = ("before the offer", "between rounds", "stop", "release")
STEP_S = 0.02  # of a token: a request lasts for some seconds

BEGIN = """
from control.migration_kit import *
from holding import Evicting, hold_behind, stop_within_a_block

class Telling:
    def put(self, *said):
        tell(said)

place = Place("victim", Telling(), settings={"lease_s": lease} | settings, bytes_per_s=slow)
go = threading.Event()

def hold(seconds):
    tell("at")
    go.wait(seconds)

def hold_at(phase, seconds, after=0):
    '''In a call of the engine, behind so many others of its kind.'''
    left = [after]

    def hook(*_):
        left[0] -= 1
        if left[0] < 0:
            del place.engine.before[phase]
            hold(seconds)

    place.engine.before[phase] = hook

def hold_behind_pool(verb, seconds, **only):
    hold_behind(place.pool, verb, lambda: hold(seconds), **only)

evicting = Evicting(place.pool)
place.engine.run(step_s)
place.pool.peers.connect(where)
place.address
"""


class Scene:
    """The survivor in this process, and a victim; what both put out is checked token by token."""

    def __init__(self, nursery, lease=LONG_LEASE, where=None, settings=None, step_s=STEP_S, **options):
        self.settings, self.step_s = settings or {}, step_s
        self.here = Place("survivor", self, settings={"lease_s": lease} | self.settings, **options)
        self.evicting = Evicting(self.here.pool)
        self.where = where(self.here.pool) if where else self.here.address
        self.nursery, self.lease = nursery, lease
        self.victims = []
        self.prompt = prompt_of(1, PROMPT)
        self.expected = reference(self.prompt, LENGTH)
        self.by = {}
        self.victim = self.begin()

    def begin(self):
        victim = self.nursery.spawn()
        self.victims.append(victim)
        victim(BEGIN, lease=self.lease, slow=SLOW, where=self.where, settings=self.settings, step_s=self.step_s)
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
        self.evicting.end()
        assert self.here.engine.finish("r") == self.expected
        eventually(lambda: self.here.migrations.arriving() == ())
        self.here.check_empty()

    def check_there(self):
        self.ask("evicting.end()\nplace.engine.end()\nNone")
        assert self.ask("len(place.engine.requests['r'].tokens)") < LENGTH
        assert self.ask("place.engine.finish('r')") == self.expected
        eventually(lambda: self.ask("list(place.migrations.arriving())") == [])
        self.ask("place.check_empty()\nNone")
        assert "r" not in self.here.engine.requests
        self.here.check_empty()

    def await_lost(self):
        eventually(lambda: not list(self.here.pool.peers))

    def close(self):
        for victim in self.victims:
            victim.close()
        self.evicting.end()
        self.here.close()


class Hold:
    """Holds a thread of this process up, once, until `go`."""

    def __init__(self):
        self.reached, self._go = threading.Event(), threading.Event()

    def __call__(self, *_):
        if not self.reached.is_set():
            self.reached.set()
            self._go.wait(60)

    def go(self):
        self._go.set()


def send_there(scene, phase, by, seconds=30.0, evicting=False):
    """Begins to migrate to the victim. What lets this process go on, when both are at the phase."""
    hold, here = Hold(), scene.here
    if evicting:
        scene.ask("evicting.begin()\nNone")
    if phase == "last blocks":
        stop_within_a_block(here.engine)
    if phase == "before the offer":
        hold_before(here.migrations._mailbox, "begin", hold)
    elif phase == "between rounds":
        calls = []
        here.engine.before["progress"] = lambda _: (calls.append(1), len(calls) == 2 and hold())
    elif phase in HERE_AS_SOURCE:
        here.engine.before[phase] = hold
    elif phase in ("fetching", "last blocks"):
        priority = "background" if phase == "fetching" else "decode"
        scene.ask(f"hold_behind_pool('fetch', {seconds}, priority={priority!r})\nNone")
    elif phase == "alloc":
        scene.ask(f"hold_behind_pool('alloc', {seconds})\nNone")
    elif phase != "released":
        scene.ask(f"hold_at({phase!r}, {seconds})\nNone")
    here.engine.begin("r", scene.prompt, LENGTH)
    here.engine.run(STEP_S)
    moving = here.migrations.migrate("r", "victim", by=by)
    if phase == "released":
        moving.wait(30)
    elif phase in HERE_AS_SOURCE:
        eventually(hold.reached.is_set)
    else:
        scene.await_phase()
    return moving, hold.go


def come_here(scene, phase, seconds=30.0, evicting=False):
    """The victim migrates its request to here. What lets this process go on, when both are at the phase."""
    hold, here = Hold(), scene.here
    if evicting:
        scene.evicting.begin()
    if phase == "last blocks":
        scene.ask("stop_within_a_block(place.engine)\nNone")
    if phase == "before the offer":
        scene.ask(f"hold_at('progress', {seconds})\nNone")
    elif phase == "between rounds":
        scene.ask(f"hold_at('progress', {seconds}, 1)\nNone")
    elif phase == "fetching":
        hold_behind(here.pool, "fetch", hold, priority="background")
    elif phase == "last blocks":
        hold_before(here.pool, "fetch", hold, priority="decode")
    elif phase == "alloc":
        hold_behind(here.pool, "alloc", hold)
    elif phase in HELD_HERE:
        here.engine.before[HELD_HERE[phase]] = hold
    elif phase != "released":
        scene.ask(f"hold_at({phase!r}, {seconds})\nNone")
    by = "tokens" if phase == "prefill" else "kv"
    scene.ask(f"place.engine.begin('r', prompt_of(1, {PROMPT}), {LENGTH})\nNone")
    scene.victim.send(f"moving = place.migrations.migrate('r', 'survivor', by={by!r})\n'begun'")
    if phase == "released":
        assert scene.ask("moving.wait(30)\nmoving.state") == "there"
    elif phase in ("alloc", "fetching", "last blocks", *HELD_HERE):
        eventually(hold.reached.is_set)
    else:
        scene.await_phase()
    return hold.go


def hold_before(owner, verb, hold, **only):
    """A call with these arguments is held up before it does anything."""
    call = getattr(owner, verb)

    def held(*args, **named):
        if only.items() <= named.items():
            hold()
        return call(*args, **named)

    setattr(owner, verb, held)
