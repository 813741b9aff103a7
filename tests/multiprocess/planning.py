"""Members of one cluster whose requests plans move, each in its own process; and what all note in one file, in order.

A member can be told to pause at a phase of an epoch: then the test stops or kills it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from control.migration_kit import ToyEngine, prompt_of, reference
from holding import Evicting, hold_behind
from kit import BLOCK, small_pool
from transfer.kit import SECRET, eventually

import kvpool
from kvpool.control.migration import Migrations, Timing
from kvpool.control.rebalancing import Rebalancer
from kvpool.policy.migration import OutputGate, Term
from kvpool.policy.rebalancing import SCHEDULERS, Planner

__all__ = ["PROMPTS", "Member", "Notes", "check_notes"]

BLOCKS = 97
CAPACITY = (BLOCKS - 1) * BLOCK
EPOCH_S = 0.4
# Requests and their prompts' tokens: MELL moves the small ones to the big one, or all to one place.
PROMPTS = {"a": 20, "b": 120, "c": 20, "d": 20}
MORE = 40  # tokens that each puts out; the last few when it may end


def _prompt(name: str) -> Any:
    return prompt_of(ord(name), PROMPTS[name])


class Notes:
    """Whole lines at the end of one file, which survive who wrote them: what was noted first stands first."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, *what: Any) -> None:
        os.write(self._file, (json.dumps(what) + "\n").encode())

    def put(self, request: str, term: Term, position: int, token: int, engine: str) -> None:
        """The reader of all engines."""
        self.note("put", request, term, position, token, engine)

    def all(self, *kinds: str) -> list[list[Any]]:
        whole = Path(self.path).read_text().rpartition("\n")[0]  # of what is being written a part may be seen
        return [one for one in map(json.loads, whole.splitlines()) if one[0] in kinds]


class Engine(ToyEngine):
    """Its requests wait a few tokens before their end, until they may end."""

    may_end = False

    def stop(self, request: str) -> Any:
        """A part of a block is left to fetch: no round has sent it, whatever came before."""
        self._call("stopping", request)
        with self.lock:
            while request in self.requests and self.requests[request].whole % BLOCK == 0 and super().step(request):
                pass
            return super().stop(request)

    def running(self) -> list[tuple[str, int]]:
        with self.lock:
            return [(name, len(one.blocks) * BLOCK) for name, one in self.requests.items()]

    def waiting(self) -> list[tuple[str, int]]:
        return []

    def place(self, request: str, to: str) -> None:
        raise AssertionError("nothing waits")

    def step(self, name: str) -> bool:
        with self.lock:
            one = self.requests.get(name)
            if one is None or one.stopped or (len(one.tokens) >= one.length - 10 and not self.may_end):
                return False
            if super().step(name):
                return True
            self._free(self.requests.pop(name))
            return False


class Pause:
    """Stops a thread at a phase, if it is to, until `go`; a note says that it is there."""

    def __init__(self, notes: Notes, name: str) -> None:
        self._notes, self._name = notes, name
        self._go = threading.Event()
        self.phase = ""

    def at(self, phase: str) -> None:
        """From now on; the first thread that comes there."""
        self._go.clear()
        self.phase = phase

    def go(self) -> None:
        self.phase = ""
        self._go.set()

    def reached(self, phase: str) -> None:
        if phase == self.phase:
            self.phase = ""
            self._notes.note("at", self._name, phase)
            self._go.wait(120)


class Planning(Planner):
    """Moves nothing before it is ready. Notes its plans from then on, and which of them move something."""

    ready, pause, notes, name = False, None, None, ""

    def plan(self, states: Any, number: Any, planner: int) -> Any:
        if not Planning.ready:
            return Planner.plan(replace(Planner(SCHEDULERS["mell"], 4, 4), moves_max=0), states, number, planner)
        made = super().plan(states, number, planner)
        Planning.notes.note("planned", Planning.name, number)
        if made.moves:
            Planning.notes.note("made", Planning.name, number)
            Planning.pause.reached("made")
            if Planning.pause.phase == "to be told":
                Planning.pause.at("told")
        return made


class Seen:
    """A cluster as a rebalancer sees it: `looks` is before it reads what the others say, `collected` behind."""

    def __init__(self, cluster: kvpool.Cluster, pause: Pause) -> None:
        self._cluster, self._pause = cluster, pause

    def members(self) -> Any:
        self._pause.reached("looks")
        self._pause.reached("told")
        found = self._cluster.members()
        self._pause.reached("collected")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


class Member:
    """A pool of the cluster with its engine, its migrations and its part in plans. One in a process."""

    def __init__(self, name: str, url: str, path: str, lease: float) -> None:
        self.name, self.notes = name, Notes(path)
        self.pause = Pause(self.notes, name)
        Planning.pause, Planning.notes, Planning.name = self.pause, self.notes, name
        self.stack = contextlib.ExitStack()
        self.cluster = self.stack.enter_context(kvpool.Cluster.join(url, lease=lease, heartbeat=0.05))
        secret = {} if self.cluster.secret else {"secret": SECRET}  # etcd keeps none
        self.pool = self.stack.enter_context(small_pool(BLOCKS, 0, name=name, lease_s=lease, **secret))
        self.pool.attach(self.cluster, name=name)
        self.evicting = Evicting(self.pool)
        self.engine = Engine(self.pool, self.notes, name)
        timing = Timing(repeat_s=0.05, silence_s=5.0, stop_s=5.0)
        self.migrations = Migrations(self.pool, self.engine, cluster=self.cluster, timing=timing)
        self._note_moves()
        self.rebalancer = self.stack.enter_context(
            Rebalancer(
                self.migrations, self.engine, Seen(self.cluster, self.pause), capacity=CAPACITY, growth=2 * BLOCK,
                epoch_s=EPOCH_S, move_s=20, policy=Planning(SCHEDULERS["mell"], instances_min=4, instances_max=4),
            )
        )  # fmt: skip
        self._note_plans()
        self.stack.callback(self.engine.end)
        self.stack.callback(self.evicting.end)
        self.engine.run(0.02)

    def begin(self, request: str) -> None:
        """A request begins here."""
        prompt = _prompt(request)
        self.engine.begin(request, prompt, len(prompt) + MORE)

    def hold_at(self, phase: str) -> None:
        """Its migrations pause in this call of the engine, or behind this fetch of the pool."""
        self.pause.at(phase)
        if phase in ("background", "decode"):
            hold_behind(self.pool, "fetch", lambda: self.pause.reached(phase), priority=phase)
        else:
            self.engine.before[phase] = lambda _: self.pause.reached(phase)

    def be_ready(self) -> None:
        """Its plans may move requests."""
        Planning.ready = True

    def check_empty(self) -> None:
        """Soon nothing is on its way, and every block is free but that for messages."""
        self.evicting.end()

        def held() -> tuple[int, ...]:
            stats = self.pool.audit().hbm
            return stats.active, stats.reserved, stats.lent, stats.quarantined, stats.pinned

        eventually(lambda: not self.engine.requests and not self.migrations.arriving())
        with contextlib.suppress(AssertionError):
            eventually(lambda: held() == (0, 0, 0, 0, 1), 20)
        assert held() == (0, 0, 0, 0, 1)

    def _note_moves(self) -> None:
        migrate = self.migrations.migrate

        def noted(request: str, to: str, **named: Any) -> Any:
            self.notes.note("asked", self.name, request, to)
            return migrate(request, to, **named)

        self.migrations.migrate = noted  # type: ignore[method-assign]

    def _note_plans(self) -> None:
        book, instance = self.rebalancer._epochs.seat.book, self.cluster.registration.instance
        accept, refused = book.accept, set()

        def noted(plan: Any, planner: Any, *others: Any) -> bool:
            before = book.accepted
            if found := accept(plan, planner, *others):
                mine = [move.request for move in plan.moves if move.source == instance]
                self.notes.note("accepted", self.name, plan.number, mine)
            elif plan.number != before and plan.number not in refused:
                refused.add(plan.number)
                self.notes.note("refused", self.name, plan.number)
            return found

        book.accept = noted


def check_notes(notes: Notes, requests: str) -> None:
    """Each request has run in one place at a time, to its end; each plan was carried out once, and none late."""
    gate, tokens, by = OutputGate(), {name: [] for name in PROMPTS}, {}
    for _, request, term, position, token, engine in notes.all("put"):
        assert by.setdefault((request, *term), engine) == engine, f"{request} runs twice in {term}"
        if gate.accept(request, Term(*term), position):
            tokens[request].append(token)
    for name in requests:
        assert tokens[name] == reference(_prompt(name), PROMPTS[name] + MORE)[PROMPTS[name] :]
    accepted, allowed = {}, Counter()
    for kind, engine, what, more in notes.all("accepted", "asked"):
        if kind == "accepted":
            assert what > accepted.get(engine, [0, 0]), f"{engine} carries out {what} after {accepted[engine]}"
            accepted[engine] = what
            allowed.update((engine, request) for request in more)
        else:
            assert allowed[engine, what], f"{engine} moves {what}, and no plan says so, or it has done so before"
            allowed[engine, what] -= 1
