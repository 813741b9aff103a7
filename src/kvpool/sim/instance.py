"""A simulated engine: a queue of prompts, a batch that decodes, and the blocks of both.

    idle ── a prompt ──▶ prefill ── first tokens ──▶ decode ── until somebody joins, leaves, or a prompt comes ──▶ ...

As engines with continuous batching do by default, prompts go first: between two decoding steps the engine computes the
next prompts, as many as fit into `batch_tokens`, while decoding requests wait. It takes prompts in the order of
arrival; the first one that finds too few blocks waits until a request ends.

A run of steps with the same batch is one event, whose length is a sum in closed form. A prompt that arrives meanwhile
ends the event after the current step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.errors import ArgumentError
from kvpool.policy.cost import CostModel
from kvpool.policy.routing import Decision
from kvpool.sim.cache import Held, InstanceCache
from kvpool.sim.loop import Loop
from kvpool.sim.requests import SimRequest
from kvpool.sim.times import DecodeTimes

__all__ = ["Batching", "Instance", "Job"]


@dataclass(frozen=True)
class Batching:
    """How engines batch.

    Attributes:
        batch_tokens: Uncached tokens of the prompts that are computed together; a longer prompt is computed alone, and
            0 computes each alone.
        batch_requests: Requests that decode at a time.
    """

    batch_tokens: int = 8192
    batch_requests: int = 256

    def __post_init__(self) -> None:
        if self.batch_tokens < 0 or self.batch_requests < 1:
            raise ArgumentError(f"batch_tokens is at least 0, batch_requests at least 1: {self}")


class Job:
    """A request on its way.

    Attributes:
        request: The request as it came.
        number: Counts arrivals.
        sent_s: When it was sent.
        decision: The global scheduler's.
        blocks: Blocks of prompt and answer.
        held: Its blocks in its instance.
        first_s: When it had its first token.
        fetched: Blocks that came from another instance.
    """

    __slots__ = ("blocks", "decision", "fetched", "first_s", "held", "number", "request", "sent_s")

    def __init__(self, request: SimRequest, number: int, sent_s: float, decision: Decision, blocks: int) -> None:
        self.request, self.number, self.sent_s, self.decision, self.blocks = request, number, sent_s, decision, blocks
        self.held: Held | None = None
        self.first_s = 0.0
        self.fetched = 0


class Instance:
    """One engine. It reports its requests' progress by two callbacks.

    Args:
        number: Of the instance.
        loop: The clock.
        cache: Its blocks.
        model: The times of prefills.
        decode: The times of decoding.
        unit: Tokens of a block.
        batching: How it batches.
        fetch: Called before a prompt is computed, with the job and its cached blocks. Returns the blocks that come from
            another instance, and when they arrive.
        prefilled: Called at a job's first token. Returns whether it decodes here.
        ended: Called when a job has all its tokens.

    Attributes:
        prefill_s: Seconds of prefills so far, with their waiting for fetched blocks.
        decode_s: Seconds of decoding.
        longest_queue: The most prompts that have waited at the same time.
    """

    def __init__(
        self,
        number: int,
        loop: Loop,
        cache: InstanceCache,
        model: CostModel,
        decode: DecodeTimes,
        unit: int,
        batching: Batching,
        fetch: Callable[[Job, int], tuple[int, float]] | None,
        prefilled: Callable[[Job], bool],
        ended: Callable[[Job], None],
    ) -> None:
        self.number, self.cache = number, cache
        self._loop, self._model, self._decode, self._unit, self._batching = loop, model, decode, unit, batching
        self._fetch, self._prefilled, self._ended = fetch, prefilled, ended
        self._waiting: deque[Job] = deque()
        self._running: list[tuple[int, int, Job]] = []  # a heap of (step after which it ends, number, job)
        self._joining: list[Job] = []  # when the step that is under way ends
        self._steps = 0  # of decoding, so far
        self._context = 0  # tokens of all that run, before the next step
        self._prefilling = False
        self._planned = 0  # steps of the event that is set; 0 for none
        self._plan_s = 0.0  # when it began
        self._version = 0  # of the plan; an event of another version is void
        self.prefill_s = self.decode_s = 0.0
        self.longest_queue = 0

    # ---- from outside

    def submit(self, job: Job) -> None:
        """Queues a prompt to be computed here."""
        self._waiting.append(job)
        if len(self._waiting) > self.longest_queue:
            self.longest_queue = len(self._waiting)
        if len(self._waiting) == 1 and self.room > 0:
            self.wake()

    def join(self, job: Job) -> None:
        """Begins to decode, with the next step, a request whose prompt is already here."""
        if self._planned:
            self._joining.append(job)
            self._stop_after_step()
            return
        self._enter(job)
        if not self._prefilling:
            self._next()

    def wake(self) -> None:
        """Reports a change that waiting requests may benefit from; they are examined after the current step."""
        if self._prefilling:
            return
        if self._planned:
            self._stop_after_step()
        else:
            self._next()

    @property
    def room(self) -> int:
        """How many more may decode."""
        return self._batching.batch_requests - len(self._running) - len(self._joining)

    # ---- prefill

    def _next(self) -> None:
        """Between steps: prompts first, then those that decode."""
        if self._waiting and (batch := self._admit()):
            self._prefill(batch)
        elif self._running:
            self._plan()

    def _admit(self) -> list[Job]:
        """The prompts that are computed next."""
        batch: list[Job] = []
        room, unit = self._batching.batch_tokens, self._unit
        free = self.room
        while self._waiting and len(batch) < free:
            job = self._waiting[0]
            request = job.request
            if batch and room < request.prompt - unit * self.cache.peek(request.ids):
                break
            held = self.cache.admit(request.ids, job.blocks)
            if held is None:
                break
            job.held = held
            batch.append(self._waiting.popleft())
            room -= max(1, request.prompt - unit * held.cached)
            if room <= 0:
                break
        return batch

    def _prefill(self, batch: list[Job]) -> None:
        now, unit = self._loop.now, self._unit
        ready, in_dram = now, 0
        prompts = []
        for job in batch:
            held, request = job.held, job.request
            assert held is not None  # admitted
            have = held.cached
            if self._fetch is not None:
                job.fetched, here_s = self._fetch(job, have)
                ready = max(ready, here_s)
            in_dram += max(0, min(unit * have, request.prompt) - unit * held.found)
            prompts.append((request.prompt, unit * (have + job.fetched)))
        if len(prompts) == 1:
            end = ready + self._model.exec_s(*prompts[0], in_dram)
        else:
            end = ready + self._model.batch_s(prompts) + self._model.swap_in_s(in_dram)
        self._prefilling = True
        self.prefill_s += end - now
        self._loop.at(end, self._first_tokens, batch)

    def _first_tokens(self, batch: list[Job]) -> None:
        self._prefilling = False
        for job in batch:
            assert job.held is not None
            self.cache.store(job.held, job.request.ids)
            job.first_s = self._loop.now
            if self._prefilled(job):
                if job.request.output == 1:
                    self._ended(job)
                else:
                    self._enter(job)
        self._next()

    # ---- decode

    def _enter(self, job: Job) -> None:
        """From the next step on; its first token is there, and each step reads all before it and makes one more."""
        request = job.request
        heapq.heappush(self._running, (self._steps + request.output - 1, job.number, job))
        self._context += request.prompt + 1

    def _plan(self) -> None:
        """Steps until the first one ends."""
        self._planned, self._plan_s = self._running[0][0] - self._steps, self._loop.now
        self._set(self._planned)

    def _stop_after_step(self) -> None:
        """The plan that is under way, if one is, ends with its step that is."""
        if self._planned <= 1:
            return
        passed = self._loop.now - self._plan_s
        steps = self._decode.steps_until(passed, len(self._running), self._context)
        if steps < self._planned:
            self._planned = steps
            self._set(steps)

    def _set(self, steps: int) -> None:
        self._version += 1
        spent = self._decode.run_s(steps, len(self._running), self._context)
        self._loop.at(self._plan_s + spent, self._stepped, self._version)

    def _stepped(self, version: int) -> None:
        if version != self._version:
            return
        running = self._running
        self.decode_s += self._loop.now - self._plan_s
        self._steps += self._planned
        self._context += self._planned * len(running)
        self._planned = 0
        while running and running[0][0] <= self._steps:
            job = heapq.heappop(running)[2]
            self._context -= job.request.prompt + job.request.output
            self._ended(job)
        for job in self._joining:
            self._enter(job)
        self._joining.clear()
        self._next()
