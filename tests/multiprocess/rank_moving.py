"""A live migration between an instance of two ranks, each a process, and a pool of this process.

The engine lives with the scheduler. It writes and reads the cells of its requests through the ranks, one value in both:
a rank that has not the same bytes as the other one, or older ones, is seen when a token is computed.
"""

from __future__ import annotations

import itertools
import os
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
from control import migration_kit
from control.migration_kit import Place, ToyEngine, prompt_of, reference
from holding import hold_behind
from kit import BLOCK, content, small_layout
from planning import Notes, Pause
from victims import Nursery, Victim, eventually

import kvpool
from kvpool.control.migration import Migrations, Timing
from kvpool.policy.migration import OutputGate, Term

__all__ = ["LENGTH", "Part", "Scene", "SplitPlace", "hold_at"]

PROMPT, LENGTH = 22, 60
SETTINGS: dict[str, Any] = {"secret": "ranks", "lease_s": 60.0, "huge_pages": "never", "check_memory": False}
TIMING = Timing(repeat_s=0.05, silence_s=3.0, stop_s=3.0)
_numbers = itertools.count(1)


def hold_at(place: Any, pause: Pause, phase: str) -> None:
    """Migrations pause in this call of the engine, or behind this call of the pool."""
    pause.at(phase)
    if phase in ("background", "decode"):
        hold_behind(place.pool, "fetch", lambda: pause.reached(phase), priority=phase)
    elif phase == "alloc":
        hold_behind(place.pool, "alloc", lambda: pause.reached(phase))
    elif phase == "between rounds":
        calls = itertools.count()
        place.engine.before["progress"] = lambda _: next(calls) and pause.reached(phase)
    else:
        place.engine.before[phase] = lambda _: pause.reached(phase)


class Part:
    """A rank, which does what its scheduler's engine says. In the rank's process."""

    def __init__(self, ticket: str) -> None:
        self.rank = kvpool.RankArena.join(ticket, device="cpu", **SETTINGS)
        self._kv = content(self.rank, kvpool.HBM)
        self.address = f"\0kvpool-part-{os.getpid()}-{next(_numbers)}"
        self._listener = Listener(self.address, family="AF_UNIX")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener.accept() as connection:
            while True:
                what, ids, ats, values = connection.recv()
                if what == "write":
                    for block, at, value in zip(ids, ats, values, strict=True):
                        self._kv[block][..., at, :] = value
                    connection.send(None)
                else:
                    cells = [self._kv[block][..., at, :] for block, at in zip(ids, ats, strict=True)]
                    connection.send([(float(cell.flat[0]), bool((cell == cell.flat[0]).all())) for cell in cells])


class SplitEngine(ToyEngine):
    """The engine of the scheduler."""

    parts: list[Connection]

    def _ask(self, *what: Any) -> list[Any]:
        for part in self.parts:
            part.send(what)
        return [part.recv() for part in self.parts]

    def _write(self, blocks: Any, first: int, tokens: list[int]) -> None:
        ids = kvpool.block_ids(blocks).tolist()
        places = range(first, len(tokens))
        self._ask("write", [ids[at // BLOCK] for at in places], [at % BLOCK for at in places],
                  [migration_kit.cell(tokens[at], at) for at in places])  # fmt: skip

    def _read(self, blocks: Any, n: int) -> Any:
        ids = kvpool.block_ids(blocks).tolist()
        found = self._ask("read", [ids[at // BLOCK] for at in range(n)], [at % BLOCK for at in range(n)], [])
        for at, cells in enumerate(zip(*found, strict=True)):
            assert all(whole for _, whole in cells), f"token {at} is half written"
            assert len({value for value, _ in cells}) == 1, f"ranks differ at token {at}"
            yield cells[0][0]


class SplitPlace:
    """The scheduler of an instance of two ranks. In its process."""

    def __init__(self, path: str) -> None:
        migration_kit.content = lambda pool, medium: None  # it lies in ranks
        self.notes = Notes(path)
        self.pause = Pause(self.notes, "victim")
        self.pool = kvpool.Pool(
            small_layout(), 64, 0, parallel=kvpool.ParallelConfig(tp=2), name="victim", audit=True, **SETTINGS
        )
        self._where = self.pool.peers.listen(f"unix:@kvpool-split-{os.getpid()}-{next(_numbers)}")

    def ticket(self, rank: int) -> str:
        return self.pool.ranks.export(rank, address=self._where)

    def begin(self, addresses: list[str], where: str) -> None:
        self.pool.ranks.wait(60)
        self.engine = SplitEngine(self.pool, self.notes, "victim")
        self.engine.parts = [Client(address, family="AF_UNIX") for address in addresses]
        self.migrations = Migrations(self.pool, self.engine, timing=TIMING)
        self.pool.peers.connect(where, timeout=60)

    def go_there(self, timeout: float) -> None:
        """Its request begins, and migrates to the survivor."""
        self.engine.begin("r", prompt_of(1, PROMPT), LENGTH)
        self.moving = self.migrations.migrate("r", "survivor", by="kv", timeout=timeout)

    def outcome(self) -> tuple[str, str]:
        """How that has ended, and who has the request."""
        return type(self.moving.exception(60)).__name__, self.moving.state


class Scene:
    """The survivor, in this process, and an instance of two ranks."""

    def __init__(self, nursery: Nursery, path: str) -> None:
        self.notes = Notes(path)
        self.pause = Pause(self.notes, "survivor")
        self.here = Place("survivor", self.notes, settings=SETTINGS, timing=TIMING)
        self.victims: list[Victim] = [nursery.spawn()]
        self.scheduler, self.ranks = self.victims[0], self.victims[1:]
        self.scheduler("from rank_moving import *\nplace = SplitPlace(path)\nNone", path=path)
        addresses = []
        for number in range(2):
            rank = nursery.spawn()
            self.victims.append(rank)
            ticket = self.scheduler("place.ticket(number)", number=number)
            addresses.append(rank("from rank_moving import *\npart = Part(ticket)\npart.address", ticket=ticket))
        self.ranks = self.victims[1:]
        self.scheduler("place.begin(addresses, where)\nNone", addresses=addresses, where=self.here.address)

    def hold(self, holder: str, phase: str) -> None:
        if holder == "survivor":
            hold_at(self.here, self.pause, phase)
        else:
            self.scheduler("hold_at(place, place.pause, phase)\nNone", phase=phase)

    def lose(self, rank: int, holder: str, phase: str) -> None:
        """The rank is killed when the migration is at this phase, in a call at this side."""
        eventually(lambda: ["at", holder, phase] in self.notes.all("at"))
        self.ranks[rank].kill()
        eventually(lambda: not self.here.pool.peers.list())
        if holder == "survivor":
            self.pause.go()
        else:
            self.scheduler("place.pause.go()\nNone")

    def check_here(self) -> None:
        """It is decoded here to its end, as without migration; no other place has put out anything in its terms."""
        expected = reference(prompt_of(1, PROMPT), LENGTH)
        assert self.here.engine.finish("r") == expected
        gate, tokens, by = OutputGate(), [], {}
        for _, request, term, position, token, engine in self.notes.all("put"):
            assert by.setdefault(tuple(term), engine) == engine, f"it runs twice in {term}"
            if gate.accept(request, Term(*term), position):
                tokens.append(token)
        assert tokens == expected[PROMPT:]

    def check_nothing_here(self) -> None:
        assert not self.here.engine.requests
        eventually(lambda: self.here.migrations.arriving() == ())
        self.here.check_empty()

    def begin_here(self) -> None:
        self.here.engine.begin("r", prompt_of(1, PROMPT), LENGTH)
        for _ in range(5):
            self.here.engine.step("r")
        assert np.count_nonzero([one[0] == "put" for one in self.notes.all("put")]) == 5

    def close(self) -> None:
        for victim in self.victims:
            victim.close()
        self.here.close()
