"""A simulated engine: a queue of prompts, a batch that decodes, and the blocks of both.

Engines with continuous batching run one forward pass after the other, and decide before each what it computes. By
default prompts are computed in chunks, as in vLLM and SGLang today: each step makes a token for every request that
decodes, and what is left of `batch_tokens` goes to prompts, in the order of arrival. A prompt that does not fit is
continued in the next step.

    step      |  A A B C  |  A A B C  |  A A B C  |      A, B, C decode, and take a token each of the budget
    prompts   |  D D D D  |  D D D E  |  E E E E  |      D is computed in two steps; its first token ends the second one

A request that begins in a step matches what is computed up to the end of that step, of the prompts before it.

Without chunks prompts go first: between two steps of decoding the engine computes the next prompts, as many whole ones
as fit into `batch_tokens`, while decoding requests wait. What prompts of such a batch share is computed once.

Either way the first prompt that finds too few blocks waits until a request ends. A run of steps that compute no prompt,
with the same batch, is one event, whose length is a sum in closed form. A prompt that arrives meanwhile ends the event
after the current step.
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
    """How engines batch. The defaults are those of vLLM's server on GPUs of less than 70 GiB, and on the A100.

    Attributes:
        batch_tokens: With chunks: tokens of a step, of prompts and of what decodes together; at least `batch_requests`.
            Without: uncached tokens of the prompts that are computed together; a longer prompt is computed alone, and 0
            computes each alone.
        batch_requests: Requests at a time, those whose prompt is begun included.
        chunked: Whether prompts are computed in chunks, beside what decodes.
    """

    batch_tokens: int = 2048
    batch_requests: int = 256
    chunked: bool = True

    def __post_init__(self) -> None:
        if self.batch_tokens < 0 or self.batch_requests < 1:
            raise ArgumentError(f"batch_tokens is at least 0, batch_requests at least 1: {self}")
        if self.chunked and self.batch_tokens < self.batch_requests:
            raise ArgumentError(
                f"batch_tokens is {self.batch_tokens}: with chunked prefill each of the {self.batch_requests} requests "
                "that decode (batch_requests) takes one of them in each step"
            )


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
        computed: Tokens of its prompt that are computed or were cached; only counted where prompts come in chunks.
    """

    __slots__ = ("blocks", "computed", "decision", "fetched", "first_s", "held", "number", "request", "sent_s")

    def __init__(self, request: SimRequest, number: int, sent_s: float, decision: Decision, blocks: int) -> None:
        self.request, self.number, self.sent_s, self.decision, self.blocks = request, number, sent_s, decision, blocks
        self.held: Held | None = None
        self.first_s = 0.0
        self.fetched = 0
        self.computed = 0


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
        prefill_s: Seconds of steps so far that computed prompts, with their waiting for fetched blocks.
        decode_s: Seconds of the others.
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
        self._prefilling = False  # prompts alone
        self._part: Job | None = None  # whose prompt is computed in part
        self._begun = 0  # prompts in chunks that are begun, and not yet computed
        self._planned = 0  # steps of the event that is set; 0 for none
        self._ready_s = 0.0  # when what the prompts of the next step find in DRAM and elsewhere is here
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
        """How many more requests it may run."""
        return self._batching.batch_requests - len(self._running) - len(self._joining) - self._begun

    # ---- prefill

    def _next(self) -> None:
        """Between steps."""
        if self._batching.chunked:
            if (self._waiting or self._part is not None) and (chunks := self._chunks()):
                self._mix(chunks)
                return
        elif self._waiting and (batch := self._admit()):
            self._prefill(batch)
            return
        if self._running:
            self._plan()

    # ---- prompts in chunks, beside what decodes

    def _chunks(self) -> list[tuple[Job, int]]:
        """The prompts of the next step, and up to which token each is computed then; the first may be begun already."""
        left = self._batching.batch_tokens - len(self._running)
        chunks: list[tuple[Job, int]] = []
        part, self._part = self._part, None
        if part is not None:
            stop = min(part.request.prompt, part.computed + left)
            left -= stop - part.computed
            chunks.append((part, stop))
            self._store(part, stop)
        ready_s, in_dram = self._loop.now, 0
        while self._waiting and left > 0 and self.room > 0:
            job = self._waiting[0]
            request = job.request
            held = self.cache.admit(request.ids, job.blocks)
            if held is None:
                break
            self._waiting.popleft()
            job.held = held
            self._begun += 1
            if self._fetch is not None:
                job.fetched, here_s = self._fetch(job, held.cached)
                ready_s = max(ready_s, here_s)
            in_dram += max(0, min(self._unit * held.cached, request.prompt) - self._unit * held.found)
            job.computed = min(self._unit * (held.cached + job.fetched), request.prompt - 1)
            stop = min(request.prompt, job.computed + left)
            left -= stop - job.computed
            chunks.append((job, stop))
            self._store(job, stop)
        self._ready_s = ready_s + self._model.swap_in_s(in_dram)
        return chunks

    def _store(self, job: Job, stop: int) -> None:
        """Others can match what is computed in this step, as in vLLM: they compute no sooner than in it."""
        ids = job.request.ids
        assert job.held is not None  # admitted
        self.cache.store(job.held, ids if stop == job.request.prompt else ids[: stop // self._unit])

    def _mix(self, chunks: list[tuple[Job, int]]) -> None:
        """Begins a step that computes chunks of prompts, and a token for each request that decodes."""
        now = self._loop.now
        spent_s = self._decode.mixed_s(
            [(stop, job.computed) for job, stop in chunks], len(self._running), self._context
        )
        end = self._ready_s + spent_s
        self._planned = 1
        self.prefill_s += end - now
        self._loop.at(end, self._mixed, chunks)

    def _mixed(self, chunks: list[tuple[Job, int]]) -> None:
        self._planned = 0
        self._advance(1)
        for job, stop in chunks:
            job.computed = stop
            if stop == job.request.prompt:
                self._begun -= 1
                self._computed(job)
            else:
                self._part = job
        self._join_all()
        self._next()

    # ---- whole prompts, while what decodes waits

    def _admit(self) -> list[Job]:
        """The prompts that are computed next."""
        batch: list[Job] = []
        room, unit = self._batching.batch_tokens, self._unit
        free = self.room
        while self._waiting and len(batch) < free:
            job = self._waiting[0]
            request = job.request
            if batch:
                self._store(batch[-1], batch[-1].request.prompt)
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
            assert job.held is not None  # admitted
            if job.held.in_hbm < len(job.request.ids):
                self.cache.store(job.held, job.request.ids)
            self._computed(job)
        self._next()

    def _computed(self, job: Job) -> None:
        """A prompt is computed: its first token is there."""
        job.first_s = self._loop.now
        if self._prefilled(job):
            if job.request.output == 1:
                self._ended(job)
            else:
                self._enter(job)

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
        self.decode_s += self._loop.now - self._plan_s
        steps, self._planned = self._planned, 0
        self._advance(steps)
        self._join_all()
        self._next()

    def _advance(self, steps: int) -> None:
        """Every request that decodes has so many tokens more; some end."""
        running = self._running
        self._steps += steps
        self._context += steps * len(running)
        while running and running[0][0] <= self._steps:
            job = heapq.heappop(running)[2]
            self._context -= job.request.prompt + job.request.output
            self._ended(job)

    def _join_all(self) -> None:
        for job in self._joining:
            self._enter(job)
        self._joining.clear()
