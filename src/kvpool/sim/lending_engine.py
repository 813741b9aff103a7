"""An engine of a simulated fleet that lends: its batch, and the time of its steps.

A step makes the next token of every sequence that decodes, and computes a chunk of the prompts that came last. Steps
with the same batch are one event. A sequence that finds no block for its next token is stopped, gives all its blocks
up, and is computed again later, as engines do; the fleet may find room first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvpool.policy.cost import Link
from kvpool.sim.lending_memory import Memory
from kvpool.sim.lending_times import Load, Part, Remote, StepTimes, Work, queue_s
from kvpool.sim.loop import Loop

__all__ = ["Batching", "Engine", "Fleet", "Job"]


@dataclass(frozen=True)
class Batching:
    """How engines batch.

    Attributes:
        block_tokens: Tokens of a block.
        chunk_tokens: Tokens of prompts that a step computes; 0: prompts take no time, as if they came with their KV.
        batch_requests: Sequences of an engine at a time.
        steps: The most steps in one event.
        compute_share: A creditor with work to do computes for others at most this share of its time.
    """

    block_tokens: int = 16
    chunk_tokens: int = 4096
    batch_requests: int = 256
    steps: int = 64
    compute_share: float = 0.5


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        number: Counts arrivals, and names its sequence.
        arrival_s: When it came.
        prompt: Tokens that it comes with.
        output: Tokens to generate.
        made: Those generated so far.
        computed: Tokens whose KV is there.
        first_s: When it had its first token.
        end_s: When it had its last; 0: not yet.
        stopped: How often it lost its blocks.
    """

    number: int
    arrival_s: float
    prompt: int
    output: int
    made: int = 0
    computed: int = 0
    first_s: float = 0.0
    end_s: float = 0.0
    stopped: int = 0

    @property
    def tokens(self) -> int:
        """Of prompt and answer, so far."""
        return self.prompt + self.made


class Fleet(Protocol):
    """What an engine asks of the others."""

    @property
    def engines(self) -> Mapping[int, Engine]:
        """All of them, by member."""

    def link(self, a: int, b: int) -> Link:
        """Between two members."""

    def make_room(self, engine: Engine, blocks: int) -> bool:
        """Frees so many more blocks at an engine, if it can."""

    def stopped(self, engine: Engine, job: Job) -> None:
        """A job lost its blocks and has to be computed again."""

    def ended(self, engine: Engine, job: Job) -> None:
        """A job has all its tokens."""

    def stepped(self, engine: Engine, tokens: int, left: bool) -> None:
        """An engine made so many tokens, and is between two steps; whether a sequence or a prompt has ended."""

    def give_back(self, debtor: int, given: Mapping[int, int]) -> None:
        """A debtor gives room back to its creditors."""


class Engine:
    """One engine.

    Attributes:
        memory: Its blocks.
        loads: What it computes for borrowers at present, by member.
        running: Sequences that decode.
        prompts: Those whose prompts are computed, in order.
        busy_s: Seconds that it computed for its own sequences.
        remote_s: Seconds of these that it waited for creditors beyond its own attention.
        stall_s: Seconds that copies will hold its next step up.
    """

    def __init__(self, loop: Loop, times: StepTimes, memory: Memory, batching: Batching, fleet: Fleet) -> None:
        self.memory = memory
        self.loads: dict[int, Load] = {}
        self.running: list[Job] = []
        self.prompts: list[Job] = []
        self.busy_s = self.remote_s = self.stall_s = 0.0
        self.kernel_s = 0.0  # the longest of the present run; 0 without one
        self._loop, self._times, self._batching, self._fleet = loop, times, batching, fleet
        self._chunk = batching.chunk_tokens * times.stages
        self._steps = 0  # of the run under way; 0: none
        self._decoding: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []
        self._asked: set[int] = set()  # creditors of the present run

    # ---- from outside

    @property
    def member(self) -> int:
        """Its id."""
        return self.memory.member

    @property
    def accepts(self) -> bool:
        """Whether it can begin one more prompt."""
        waiting = sum(job.tokens - job.computed for job in self.prompts)
        few = len(self.running) + len(self.prompts) < self._batching.batch_requests
        return few and (not waiting or waiting < self._chunk)

    def blocks_of(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self._batching.block_tokens)

    def join(self, job: Job) -> None:
        """Begins a job, for whose tokens and one more it has blocks."""
        if self._chunk and job.computed < job.tokens:
            self.prompts.append(job)
        else:
            job.computed = job.tokens
            self._written(job)
        self.wake()

    def wake(self) -> None:
        """Goes on if it has work and does not run."""
        if not self._steps and (self.running or self.prompts):
            self._go()

    # ---- a run of steps

    def _go(self) -> None:
        steps = self._reserve()
        self._decoding = list(self.running)
        self._chunks = self._cut_chunks()
        if not self._decoding and not self._chunks:
            self._ask(set())
            self.kernel_s = 0.0
            return
        self._steps = steps
        work, sent_s = self._work(steps)
        seconds = self._seconds(work, steps)
        self._loop.at(self._loop.now + self.stall_s + max(seconds, sent_s), self._ran, steps)
        self.stall_s = 0.0
        self.busy_s += seconds

    def _reserve(self) -> int:
        """Blocks for the next steps of all sequences that decode; how many steps have them."""
        left = [job.output - job.made for job in self.running]
        steps = 1 if self.prompts or not left else min(self._batching.steps, *left)
        while self.running:
            needs = [(job, need) for job in self.running if (need := self._needs(job, steps)) > 0]
            short = sum(need for _, need in needs) - self.memory.free
            if short <= 0:
                for job, need in needs:
                    self.memory.grow(job.number, need)
                break
            if steps > 1:
                steps = 1
            elif not self._fleet.make_room(self, short):
                self._stop(self.running[-1])
        return steps

    def _needs(self, job: Job, steps: int) -> int:
        return self.blocks_of(job.tokens + steps) - self.memory.sequences[job.number].blocks

    def _stop(self, job: Job) -> None:
        self.running.remove(job)
        job.computed = 0
        job.stopped += 1
        self._fleet.give_back(self.member, self.memory.end(job.number))
        self._fleet.stopped(self, job)

    def _cut_chunks(self) -> list[tuple[Job, int]]:
        left = self._chunk
        chunks = []
        for job in self.prompts:
            if not left:
                break
            tokens = min(left, job.tokens - job.computed)
            chunks.append((job, tokens))
            left -= tokens
        return chunks

    def _work(self, steps: int) -> tuple[Work, float]:
        """What a step in the middle of the run computes, and how long a chunk's blocks take on their way out."""
        work = Work(len(self._decoding), sum(tokens for _, tokens in self._chunks))
        unit = self._batching.block_tokens
        for job in self._decoding:
            away = 0
            for creditor, blocks in self.memory.sequences[job.number].at().items():
                work.remote.setdefault(creditor, Part()).add(1, blocks * unit)
                away += blocks * unit
            work.local.add(1, job.tokens - away)
            work.longest = max(work.longest, job.tokens)
        work.local.reads += len(self._decoding) * (steps - 1) // 2
        sent: dict[int, int] = {}
        for job, new in self._chunks:
            done, home = job.computed, job.computed
            for loan in self.memory.sequences[job.number].loans:
                begin, end = loan.first * unit, (loan.first + loan.blocks) * unit
                old = max(0, min(end, done) - begin)
                if old:
                    work.remote.setdefault(loan.creditor, Part()).add(new, old, float(new) * old)
                    home -= old
                sent[loan.creditor] = sent.get(loan.creditor, 0) + max(0, min(end, done + new) - max(begin, done))
            work.local.add(new, home + new, float(new) * home + new * new / 2)
        times, link = self._times, self._fleet.link
        return work, sum(times.kv_bytes * tokens / link(self.member, to).bytes_per_s for to, tokens in sent.items())

    def _seconds(self, work: Work, steps: int) -> float:
        """Of the run. Creditors learn what they compute for it."""
        times, layers = self._times, self._times.layers
        remote: dict[int, Remote] = {}
        floor_s = 0.0  # a step lasts at least as long as the share that creditors lend demands
        for creditor, part in work.remote.items():
            other = self._fleet.engines[creditor]
            loads = [load for member, load in other.loads.items() if member != self.member]
            service_s = times.part_s(part)
            round_trip_s = times.round_trip_s(part.rows, self._fleet.link(self.member, creditor))
            remote[creditor] = Remote(queue_s(loads, other.kernel_s), round_trip_s, service_s)
            lends = self._batching.compute_share if other.kernel_s else 1.0
            share = max(lends - sum(load.share for load in loads), lends / (len(loads) + 1))
            floor_s = max(floor_s, layers * service_s / share)
        alone_s = times.step_s(work)
        step_s = max(times.step_s(work, remote.values()), floor_s)
        self._ask(set(remote))
        for creditor, each in remote.items():
            share = layers * each.service_s / step_s
            self._fleet.engines[creditor].loads[self.member] = Load(each.service_s, share)
        self.kernel_s = times.kernel_s(work)
        self.remote_s += steps * (step_s - alone_s)
        lent = min(self._batching.compute_share, sum(load.share for load in self.loads.values()))
        return steps * step_s / (1 - lent)

    def _ask(self, creditors: set[int]) -> None:
        """Takes this engine's load from creditors that it asks no more."""
        for creditor in self._asked - creditors:
            self._fleet.engines[creditor].loads.pop(self.member, None)
        self._asked = creditors

    def _ran(self, steps: int) -> None:
        made, left = 0, False
        for job in self._decoding:
            job.made += steps
            job.computed += steps
            made += steps
            self._wrote(job)
        for job, tokens in self._chunks:
            job.computed += tokens
            self._wrote(job)
            if job.computed == job.tokens:
                self.prompts.remove(job)
                self._written(job)
                job.made += 1
                job.computed += 1
                made += 1
                left = True
        for job in [job for job in self.running if job.made]:
            if not job.first_s:
                job.first_s = self._loop.now
            if job.made >= job.output:
                self.running.remove(job)
                job.end_s = self._loop.now
                left = True
                self._fleet.give_back(self.member, self.memory.end(job.number))
                self._fleet.ended(self, job)
        self._fleet.stepped(self, made, left)
        self._steps = 0
        self._go()

    def _written(self, job: Job) -> None:
        """All of its prompt is there: it decodes."""
        self._wrote(job)
        self.memory.unstage(job.number)
        self.running.append(job)

    def _wrote(self, job: Job) -> None:
        stored = self.memory.sequences[job.number]
        stored.written = min(stored.blocks, job.computed // self._batching.block_tokens)
