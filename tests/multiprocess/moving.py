"""A live migration between this process and a victim, and how both are brought to each phase of it, by events."""

from __future__ import annotations

import threading

from control.migration_kit import Place, prompt_of, reference
from victims import eventually

__all__ = ["LENGTH", "PROMPT", "SLOW", "Hold", "Scene", "come_here", "send_there"]

PROMPT, LENGTH = 41, 200
SLOW = 50 * 4 * 4 * 2 * 2 * 2 * 4  # bytes a second: the first round of ten blocks takes a fifth of one, in pieces
LONG_LEASE = 60.0
HELD_HERE = {"admit": "admit", "handed": "adopt", "adopted": "adopted"}  # where the survivor is the destination
STEP_S = 0.02  # of a token: a request lasts for some seconds

BEGIN = """
from control.migration_kit import *
from control.migration_kit import eventually
from kit import prompt, store

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

def hold_behind(verb, seconds, **only):
    '''When a call of the pool, by a migration, with these arguments has begun what it does.'''
    call = getattr(place.pool, verb)

    def held(*args, **named):
        found = call(*args, **named)
        if threading.current_thread().name == "kvpool-migration" and only.items() <= named.items():
            delattr(place.pool, verb)
            hold(seconds)
        return found

    setattr(place.pool, verb, held)

evicting = threading.Event()

def evict():
    number = 0
    while evicting.is_set():
        number += 1
        store(place.pool, prompt(6, number), evict=True)

def begin_to_evict():
    evicting.set()
    threading.Thread(target=evict, daemon=True).start()
    eventually(lambda: place.pool.stats().hbm.free < 6)

place.engine.run(step_s)
place.pool.peers.connect(where)
place.address
"""


class Scene:
    """The survivor in this process, and a victim; what both put out is checked token by token."""

    def __init__(self, nursery, lease=LONG_LEASE, where=None, settings=None, step_s=STEP_S, **options):
        self.settings, self.step_s = settings or {}, step_s
        self.here = Place("survivor", self, settings={"lease_s": lease} | self.settings, **options)
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
        assert self.here.engine.finish("r") == self.expected
        eventually(lambda: self.here.migrations.arriving() == ())
        self.here.check_empty()

    def check_there(self):
        self.ask("evicting.clear()\nplace.engine.end()\nNone")
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


def send_there(scene, phase, by, seconds=30.0):
    """Begins to migrate to the victim. What lets this process go on, when both are at the phase."""
    hold, here = Hold(), scene.here
    if phase == "before the offer":
        hold_before(here.migrations._mailbox, "begin", hold)
    elif phase == "between rounds":
        calls = []
        here.engine.before["progress"] = lambda _: (calls.append(1), len(calls) == 2 and hold())
    elif phase == "stop":
        here.engine.before["stop"] = hold
    elif phase in ("fetching", "last blocks"):
        priority = "background" if phase == "fetching" else "decode"
        scene.ask(f"hold_behind('fetch', {seconds}, priority={priority!r})\nNone")
    elif phase == "evicting":
        scene.ask(f"begin_to_evict()\nhold_behind('alloc', {seconds})\nNone")
    else:
        scene.ask(f"hold_at({phase!r}, {seconds})\nNone")
    here.engine.begin("r", scene.prompt, LENGTH)
    here.engine.run(STEP_S)
    moving = here.migrations.migrate("r", "victim", by=by)
    if phase in ("before the offer", "between rounds", "stop"):
        eventually(hold.reached.is_set)
    else:
        scene.await_phase()
    return moving, hold.go


def come_here(scene, phase, seconds=30.0):
    """The victim migrates its request to here. What lets this process go on, when both are at the phase."""
    hold, here = Hold(), scene.here
    if phase == "before the offer":
        scene.ask(f"hold_at('progress', {seconds})\nNone")
    elif phase == "between rounds":
        scene.ask(f"hold_at('progress', {seconds}, 1)\nNone")
    elif phase in ("fetching", "last blocks"):
        fetch, urgent = here.pool.fetch, phase == "last blocks"

        def fetch_later(*args, priority, **named):
            if urgent and priority == "decode":
                hold()
            found = fetch(*args, priority=priority, **named)
            if not urgent:
                hold()
            return found

        here.pool.fetch = fetch_later
    elif phase in HELD_HERE:
        here.engine.before[HELD_HERE[phase]] = hold
    else:
        scene.ask(f"hold_at({phase!r}, {seconds})\nNone")
    scene.ask(f"place.engine.begin('r', prompt_of(1, {PROMPT}), {LENGTH})\nNone")
    scene.victim.send("moving = place.migrations.migrate('r', 'survivor', by='kv')\n'begun'")
    if phase in ("fetching", "last blocks", *HELD_HERE):
        eventually(hold.reached.is_set)
    else:
        scene.await_phase()
    return hold.go


def hold_before(owner, verb, hold):
    """A call is held up before it does anything."""
    call = getattr(owner, verb)

    def held(*args, **named):
        hold()
        return call(*args, **named)

    setattr(owner, verb, held)
