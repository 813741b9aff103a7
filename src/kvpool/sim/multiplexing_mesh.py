"""One mesh of GPUs and the models that share it, on a virtual clock: queues, jobs, and the scheduler that picks them.

The scheduler is an object of `kvpool.policy.multiplexing`, the same that an engine would ask; so are the quotas
(`MeshMemory`). The mesh does what they say: it starts jobs, lets them run beside each other (`multiplexing_times`),
gives requests their blocks, and stops a request when a model cannot go on without that.

A prefill makes the first token of an answer, each decode step one more. A stopped request loses its blocks and waits
at the front of its model's queue; its prompt is then everything that it has so far, which is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from kvpool.errors import ArgumentError, StateError
from kvpool.policy import multiplexing as mux
from kvpool.sim.loop import Loop
from kvpool.sim.multiplexing_memory import BLOCK_TOKENS, MeshMemory
from kvpool.sim.multiplexing_requests import Counts, Request
from kvpool.sim.multiplexing_times import JobTimes, Parts, alone_s, slowdown

__all__ = ["Mesh", "Resident", "Scheduler"]

_SEEN: Final = 32  # prompts of a model that a scheduler is shown: more than a job has
_LEAST_S: Final = 1e-9  # a job with less left than this has ended: rates are floats
_ADAPT_S: Final = 1.0


class Scheduler(Protocol):
    """`ADBS`, or one of those that it is compared with."""

    def step(self, state: mux.State) -> list[mux.Job]:
        """The jobs to start now."""


class Resident(NamedTuple):
    """A model on a mesh.

    Attributes:
        served: The model and its workload.
        times: Of its jobs.
        decode_share: Of the mesh's compute, from the placement.
        prefill_share: Likewise, of a prefill job.
    """

    served: mux.ServedModel
    times: JobTimes
    decode_share: float
    prefill_share: float


@dataclass(slots=True, eq=False)
class _Running:
    """A job under way."""

    job: mux.Job
    requests: list[Request]
    parts: Parts
    left: float = 1.0  # of its work
    rate: float = 0.0  # of its work a second


@dataclass(slots=True, eq=False)
class _Model:
    """A resident's queues."""

    resident: Resident
    prompts: deque[mux.Waiting] = field(default_factory=deque)
    ready: dict[Request, None] = field(default_factory=dict)  # that decode and are in no job, the oldest first
    backlog: int = 0  # units that the prompts ask for
    active: int = 0  # requests that are in a job or decode
    shown: tuple[mux.Waiting, ...] | None = None  # what a scheduler sees of `ready`; None: it has changed


class Mesh:
    """Models on `tp` GPUs.

    Invariants, whenever the loop is not in a call of this mesh:
      S1. Each request that arrived is refused, waits for its prefill, decodes, is in one job, or has ended.
      S2. The shares of running jobs sum up to at most 1; a model has at most one job of each phase.
      S3. No model has more than BATCH_MAX requests in jobs and decoding, as engines limit their batches: without that,
          prompts that keep coming would hold up decode until the memory is full, where they go first.
      S4. A request in a job holds the blocks of its tokens; one that waits for its prefill holds none.

    Args:
        residents: The models.
        tp: GPUs.
        scheduler: Who decides what runs.
        memory: Of the mesh.
        loop: The clock.
        measured: From when until when what is used is counted.
    """

    def __init__(
        self,
        residents: Sequence[Resident],
        tp: int,
        scheduler: Scheduler,
        memory: MeshMemory,
        loop: Loop,
        measured: tuple[float, float] = (0.0, float("inf")),
    ) -> None:
        if not residents:
            raise ArgumentError("a mesh without models")
        self.tp = tp
        self.memory = memory
        self.counts = Counts()
        self.requests: list[Request] = []
        self._scheduler = scheduler
        self._measured = measured
        self._loop = loop
        self._models = {each.served.name: _Model(each) for each in residents}
        self._running: list[_Running] = []
        self._turns = mux.Turns()
        self._at_s = 0.0  # until when jobs have been advanced
        self._plan = 0  # number of the next end of a job; earlier ones are void
        self._adapt_s = 0.0
        self._checked = False

    # ---- events

    def run(self, until_s: float, check: bool = False) -> None:
        """Runs the clock up to a time, or until nothing is left to do.

        Args:
            until_s: Seconds.
            check: Whether to check the invariants after each event; for tests.
        """
        self._checked = check
        self._loop.run_before(until_s)

    def arrive(self, request: Request) -> None:
        """A request comes, now."""
        self.counts.arrived += 1
        self.requests.append(request)
        name = request.model
        if not self.memory.fits(name, request.prompt + request.output - 1):
            self.counts.refused += 1
            return
        self._advance()
        self._wait(request, front=False)
        self._start()

    def _wait(self, request: Request, front: bool) -> None:
        model = self._models[request.model]
        units = self.memory.units(request.model, request.to_compute)
        waiting = mux.Waiting(request, units, request.time_s)
        model.backlog += units
        if front:
            model.prompts.appendleft(waiting)
        else:
            model.prompts.append(waiting)

    def _tick(self, plan: int) -> None:
        """The job that ends first has ended, if nothing has changed since this was planned."""
        if plan != self._plan:
            return
        self._advance()
        ended = [each for each in self._running if each.left * alone_s(each.parts, each.job.share) <= _LEAST_S]
        for each in ended:
            self._running.remove(each)
            self._end(each)
        self._start()

    def _end(self, running: _Running) -> None:
        model = self._models[running.job.model]
        now = self._loop.now
        for request in running.requests:
            request.made += 1
            self.counts.tokens += 1
            if request.first_s < 0:
                request.first_s = now
            if request.made >= request.output:
                request.end_s = now
                model.active -= 1
                self.counts.ended += 1
                self.memory.give_back(request.model, request)
            else:
                model.ready[request] = None
        model.shown = None

    # ---- time

    def _advance(self) -> None:
        """Lets running jobs come as far as they are by now."""
        before, now = self._at_s, self._loop.now
        self._at_s = now
        if now <= before:
            return
        for each in self._running:
            each.left -= each.rate * (now - before)
        elapsed = min(now, self._measured[1]) - max(before, self._measured[0])
        if elapsed <= 0:
            return
        used = self.counts.used
        for name in self._models:
            used[name] = used.get(name, 0.0) + elapsed * self.memory.used(name)

    def _pace(self) -> None:
        """Sets the rates of the jobs that run now, and plans the next end."""
        self._plan += 1
        if not self._running:
            return
        slower = slowdown([(each.parts, each.job.share) for each in self._running])
        soonest = float("inf")
        for each in self._running:
            each.rate = 1 / alone_s(each.parts, each.job.share, slower=slower)
            soonest = min(soonest, each.left / each.rate)
        self._loop.at(self._loop.now + soonest, self._tick, self._plan)

    # ---- decisions

    def _start(self) -> None:
        """Starts what the scheduler says; if a model or all cannot go on, stops a request and asks again."""
        self._adapt()
        hidden: set[str] = set()  # models whose prompts wait: decode has what became free
        while (advice := mux.preemption(self._decide(self._state(hidden)))) is not None:
            self._stop(advice)
            helped = {advice.model} if self._running else set(self._models)
            decodes = any(self._models[name].ready for name in helped)
            hidden = hidden | helped if decodes else hidden - helped
        if self._waits() and not self._running:
            raise StateError(f"nothing runs, and {self._waits()} requests wait: the scheduler stands still")
        self._pace()
        if self._checked:
            self.check()

    def _decide(self, state: mux.State) -> mux.State:
        """Asks the scheduler, and starts its jobs; the state after that."""
        jobs = self._scheduler.step(state)
        if not jobs:
            return state
        after = mux.started(state, jobs)
        self._turns = after.turns
        for job in jobs:
            self._begin(job)
        return after

    def _state(self, hidden: Container[str] = ()) -> mux.State:
        """What a scheduler sees, without the prompts of some models."""
        running = [each.job for each in self._running]
        return mux.State(
            [self._queues(name, model, name not in hidden) for name, model in self._models.items()],
            self.memory.available,
            running,
            self._turns,
        )

    def _queues(self, name: str, model: _Model, prompts: bool) -> mux.ModelQueues:
        if model.shown is None:
            block = self.memory.units(name, 1)
            for request in model.ready:
                if request.steps is None:
                    request.steps = [mux.Waiting(request, units, request.time_s) for units in (0, block)]
            model.shown = tuple([each.steps[each.cached % BLOCK_TOKENS == 0] for each in model.ready if each.steps])
        seen = min(_SEEN, len(model.prompts), mux.BATCH_MAX - model.active) if prompts else 0
        return mux.ModelQueues(
            name,
            [model.prompts[at] for at in range(seen)],
            model.shown,
            prefill_share=model.resident.prefill_share,
            decode_share=model.resident.decode_share,
            **self.memory.view(name),
        )

    def _begin(self, job: mux.Job) -> None:
        """Starts a job: its requests get their blocks and leave their queue."""
        model = self._models[job.model]
        requests: list[Request] = list(job.requests)  # type: ignore[arg-type]
        times = model.resident.times
        needs: dict[Hashable, int] = {}
        if job.phase == "prefill":
            for request in requests:
                waiting = model.prompts.popleft()
                if waiting.request is not request:
                    raise StateError(f"a prefill of {job.model!r} passes over a prompt that came before")
                needs[request] = waiting.units
                model.backlog -= waiting.units
                model.active += 1
                self.counts.computed += request.to_compute
            parts = times.prefill_parts([request.to_compute for request in requests], self.tp)
        else:
            context = 0
            block = self.memory.units(job.model, 1)
            for request in requests:
                del model.ready[request]
                context += request.cached
                if request.cached % BLOCK_TOKENS == 0:
                    needs[request] = block
            parts = times.decode_parts(len(requests), context, self.tp)
            model.shown = None
        self.memory.take(job.model, needs)
        self.counts.jobs += 1
        self.counts.read_s += parts.memory_s
        self._running.append(_Running(job, requests, parts))

    def _stop(self, advice: mux.Job) -> None:
        """A request loses its blocks, and waits to be computed again."""
        model = self._models[advice.model]
        for request in advice.requests:
            assert isinstance(request, Request)
            del model.ready[request]
            model.active -= 1
            self.memory.give_back(advice.model, request)
            request.stopped += 1
            self.counts.stopped += 1
            self._wait(request, front=True)
        model.shown = None

    def _adapt(self) -> None:
        now = self._loop.now
        if now >= self._adapt_s:
            self.memory.adapt(now, {name: model.backlog for name, model in self._models.items()})
            self._adapt_s = now + _ADAPT_S

    def _waits(self) -> int:
        return sum(len(model.prompts) + len(model.ready) for model in self._models.values())

    # ---- for tests

    def check(self) -> None:
        """Raises AssertionError if M1 to M3 of the memory or S1 to S4 is broken."""
        self.memory.check()
        running = [request for each in self._running for request in each.requests]
        places = [*running, *(request for model in self._models.values() for request in model.ready)]
        prompts = [each.request for model in self._models.values() for each in model.prompts]
        counts = self.counts
        assert len(set(places + prompts)) == len(places) + len(prompts), "S1"
        assert counts.arrived == counts.refused + counts.ended + len(places) + len(prompts), "S1"
        assert sum(each.job.share for each in self._running) <= 1 + 1e-6, "S2"
        phases = [(each.job.model, each.job.phase) for each in self._running]
        assert len(set(phases)) == len(phases), "S2"
        for name, model in self._models.items():
            assert model.active == sum(request.model == name for request in places) <= mux.BATCH_MAX, "S3"
        for request in places:
            held = self.memory.holds(request.model, request)
            assert held >= self.memory.units(request.model, request.cached), "S4"
        for waiting in prompts:
            assert isinstance(waiting, Request)
            assert self.memory.holds(waiting.model, waiting) == 0, "S4"
