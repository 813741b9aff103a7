"""An engine whose requests overlap: some wait, some load, some compute, and some are preempted or end early."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from engines.vllm_kit import BLOCK, Request, prompt
from engines.vllm_workers_kit import WorkersEngine

RUNNING_MAX = 4
WAITING_MAX = 4


class Overlapping:
    """Drives an engine of the kits as vLLM's scheduler does. What it does is chosen by a generator."""

    def __init__(self, engine: Any, peer: str, rng: random.Random):
        self.engine, self.peer, self.rng = engine, peer, rng
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.told: deque[tuple[list[int], Any]] = deque()  # prompts that the peer has announced
        self.other: Overlapping
        self._last = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def ask(self) -> None:
        """A client asks."""
        if len(self.waiting) >= WAITING_MAX:
            return
        chance = self.rng
        tokens = prompt(chance.choice([0, 8, 12, 16]), chance.randrange(2))
        tokens += prompt(chance.randrange(1, 40), chance.randrange(4))
        what, params = chance.random(), None
        if self.told and what < 0.5:
            tokens, params = self.told.popleft()
        elif what < 0.75:
            params = {"kvpool": {"to": self.peer}}
        elif what < 0.95:
            params = {"kvpool": {"pull": self.peer}}
        self._last += 1
        self.waiting.append(self.engine.start(Request(str(self._last), tokens, kv_transfer_params=params)))

    def tick(self) -> None:
        """A step of the engine, and something that happens beside."""
        self._happen()
        self._step({request.request_id: self._count(request) for request in self._computing()})
        if self.rng.random() < 0.4:
            self._copies_end()

    def drain(self) -> None:
        """A step in which all goes well."""
        self.engine.clock.now += 0.1
        self._copies_end()
        self._step({request.request_id: request.num_tokens for request in self._computing()})

    # ----

    def _computing(self) -> list[Request]:
        self._admit()
        return [request for request in self.running if request.request_id not in self.engine.waiting]

    def _count(self, request: Request) -> int:
        return self.rng.choice([3, 4, 9, 100])

    def _admit(self) -> None:
        engine = self.engine
        for request in list(self.waiting):
            if len(self.running) >= RUNNING_MAX:
                break
            more, later = engine.planner.match(request, 0)
            if more is None:
                continue
            needed = -(-request.num_tokens // BLOCK)
            if needed > len(engine.free):
                break
            request.blocks += [engine.free.pop() for _ in range(needed)]
            engine.planner.allocated(request, [request.blocks], more)
            request.num_computed_tokens += more
            if later and more:
                engine.waiting.add(request.request_id)
            self.waiting.remove(request)
            self.running.append(request)

    def _step(self, counts: dict[str, int]) -> None:
        engine = self.engine
        left = {request.request_id: request.num_tokens - request.num_computed_tokens for request in self.running}
        engine.step({request_id: min(count, left[request_id]) for request_id, count in counts.items()})
        if isinstance(engine, WorkersEngine):
            assert engine.index.has_work in (True, False)  # vLLM asks, and sends begin
        for request in self._ended():
            engine.check(request)
            self.running.remove(request)
            answer = engine.finish(request)
            if answer:
                self.other.told.append((list(request.all_token_ids), answer))

    def _ended(self) -> list[Request]:
        return [
            request
            for request in self.running
            if request.num_computed_tokens >= request.num_tokens and request.request_id not in self.engine.waiting
        ]

    def _copies_end(self) -> None:
        if isinstance(self.engine, WorkersEngine):
            self.engine.pool.finish_all()

    def _happen(self) -> None:
        chance, engine = self.rng, self.engine
        engine.clock.now += 0.01
        if isinstance(engine, WorkersEngine):
            worker = chance.choice(engine.pool.workers)
            if chance.random() < 0.1:
                worker.fail_saves = [chance.choice(["now", "later"])]
            if chance.random() < 0.05:
                worker.fail_loads = [chance.choice(["now", "later"])]
        if chance.random() < 0.02:
            engine.planner.reset()
        if self.waiting and chance.random() < 0.02:
            engine.finish(self.waiting.pop())
        if chance.random() < 0.05 and (computing := self._computing()):
            request = chance.choice(computing)
            engine.preempt(request)
            self.running.remove(request)
            self.waiting.appendleft(request)
