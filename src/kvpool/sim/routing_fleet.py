"""A fleet behind the global scheduler, in discrete events: how a routing policy affects times to first token.

The scheduler with its trees, and each instance's radix index, which evicts when it is full, are real. Times are
predicted: each instance computes one prompt after another, and the cost model gives the time from what the instance's
index holds, not from what the scheduler believes. Decoding takes a fixed time per token and does not slow prefills (as
in the paper's 3P1D); the answer is then cached after the prompt (PD-Caching-3). Same input, same output.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.index import EventStream, PromptIndex
from kvpool.policy.cost import CostModel, KVTransfer
from kvpool.policy.routing import Decision, GlobalScheduler, Request

__all__ = ["FleetResult", "FleetSim", "Session", "Turn"]

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Turn:
    """One request and its answer; both int32."""

    prompt: Tokens
    output: Tokens


@dataclass(frozen=True)
class Session:
    """Requests that are sent one after the other, each after the answer to the one before.

    Attributes:
        name: The session's, for the policy session-id.
        start_s: When the first request is sent.
        turns: In order.
        think_s: From an answer's end to the next request.
    """

    name: str
    start_s: float
    turns: Sequence[Turn]
    think_s: float = 0.0


@dataclass(frozen=True)
class FleetResult:
    """The results; arrays have an entry for each request, in the order in which they were sent.

    Attributes:
        ttft_s: From sending to the first token.
        prompt_tokens: Their lengths.
        cached_tokens: Tokens of each that its instance held when it began.
        fetched_tokens: Tokens of each that came from another instance.
        instance: The instance that computed each.
        work_s: Seconds that each instance was busy.
        end_s: When the last answer ended.
    """

    ttft_s: Floats
    prompt_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    fetched_tokens: npt.NDArray[np.int64]
    instance: npt.NDArray[np.int64]
    work_s: Floats
    end_s: float

    @property
    def hit_ratio(self) -> float:
        """Share of the prompts' tokens that were cached where they were computed."""
        return float(self.cached_tokens.sum() / self.prompt_tokens.sum())

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest instance, over the mean."""
        return float(self.work_s.max() / self.work_s.mean())


@dataclass(eq=False)
class _Job:
    number: int
    session: Session
    turn: int
    sent_s: float
    decision: Decision


@dataclass
class _Instance:
    """An engine: a queue, and a radix index with a bound on its blocks."""

    index: PromptIndex
    capacity: int
    events: EventStream | None
    queue: deque[_Job] = field(default_factory=deque)
    busy: bool = False
    work_s: float = 0.0

    def store(self, tokens: Tokens) -> None:
        """Caches a prompt, evicting the least recently used blocks. Cuts a prompt that is too long."""
        block = self.index.block_tokens
        blocks = min(len(tokens) // block, self.capacity)
        tokens = tokens[: blocks * block]
        with self.index.match(tokens) as held:  # pinned: making room must not take it
            missing = blocks - held.tokens // block
            over = len(self.index) + missing - self.capacity
            if over > 0:
                missing -= max(0, over - len(self.index.evict(over)))
            if missing <= 0:
                return
            blocks = held.tokens // block + missing
            self.index.insert(tokens[: blocks * block], np.zeros(blocks, dtype=np.uint64)).close()


class FleetSim:
    """Runs sessions through a scheduler.

    Args:
        scheduler: Makes a scheduler without instances from the simulator's clock.
        instances: How many there are.
        model: Gives the real times of prefills.
        capacity_blocks: Blocks that each instance can cache.
        transfer: The real cost of moving KV between instances; None if they cannot.
        token_s: Seconds of decoding per token.
        by_events: The scheduler follows the instances' events; otherwise it learns from responses.
    """

    def __init__(
        self,
        scheduler: Callable[[Callable[[], float]], GlobalScheduler],
        instances: int,
        model: CostModel,
        capacity_blocks: int,
        *,
        transfer: KVTransfer | None = None,
        token_s: float = 0.03,
        by_events: bool = False,
    ) -> None:
        if instances < 1 or capacity_blocks < 1:
            raise ArgumentError(
                f"{instances} instances of {capacity_blocks} blocks: there must be one of each at least"
            )
        self.now = 0.0
        self._model, self._transfer, self._token_s = model, transfer, token_s
        self.scheduler = scheduler(lambda: self.now)
        self._instances: list[_Instance] = []
        for number in range(instances):
            index = PromptIndex(model.block_tokens)
            stream = index.subscribe() if by_events else None
            self._instances.append(_Instance(index, capacity_blocks, stream))
            self.scheduler.add_instance(number, by_events=by_events)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._rows: list[tuple[float, int, int, int, int]] = []

    def run(self, sessions: Iterable[Session]) -> FleetResult:
        """Runs until the last answer. Call it once."""
        for session in sessions:
            self._at(session.start_s, self._send, session, 0)
        while self._heap:
            self.now, _, event, arguments = heapq.heappop(self._heap)
            event(*arguments)
        columns = np.array(self._rows, dtype=np.float64).reshape(-1, 5).T
        whole = columns[1:].astype(np.int64)
        work_s = np.array([instance.work_s for instance in self._instances])
        return FleetResult(columns[0], whole[0], whole[1], whole[2], whole[3], work_s, self.now)

    def _at(self, when: float, event: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._heap, (when, next(self._order), event, arguments))

    def _send(self, session: Session, turn: int) -> None:
        self._follow_events()
        prompt = session.turns[turn].prompt
        decision = self.scheduler.route(Request(prompt, session.name))
        job = _Job(len(self._rows), session, turn, self.now, decision)
        self._rows.append((0.0, len(prompt), 0, 0, decision.instance))
        instance = self._instances[decision.instance]
        instance.queue.append(job)
        if not instance.busy:
            self._begin(instance)

    def _begin(self, instance: _Instance) -> None:
        job = instance.queue.popleft()
        instance.busy = True
        prompt = job.session.turns[job.turn].prompt
        with instance.index.match(prompt) as hit:
            cached = hit.tokens
        fetched, fetch = 0, job.decision.fetch
        if fetch is not None and self._transfer is not None and fetch.stop > cached:
            # By now the other one may hold less than the scheduler believed.
            fetched = max(0, min(fetch.stop, self._instances[fetch.instance].index.peek(prompt)) - cached)
        spent_s = self._model.exec_s(len(prompt), cached + fetched)
        if fetched and self._transfer is not None:
            spent_s += self._transfer.time_s(fetched)
        instance.work_s += spent_s
        row = self._rows[job.number]
        self._rows[job.number] = (self.now + spent_s - job.sent_s, row[1], cached, fetched, row[4])
        self._at(self.now + spent_s, self._first_token, instance, job)

    def _first_token(self, instance: _Instance, job: _Job) -> None:
        turn = job.session.turns[job.turn]
        instance.store(turn.prompt)
        self.scheduler.first_token(job.decision.ticket)
        self._at(self.now + len(turn.output) * self._token_s, self._end, instance, job)
        instance.busy = False
        if instance.queue:
            self._begin(instance)

    def _end(self, instance: _Instance, job: _Job) -> None:
        turn = job.session.turns[job.turn]
        instance.store(np.concatenate([turn.prompt, turn.output]))
        self.scheduler.finished(job.decision.ticket, turn.output)
        if job.turn + 1 < len(job.session.turns):
            self._at(self.now + job.session.think_s, self._send, job.session, job.turn + 1)

    def _follow_events(self) -> None:
        for number, instance in enumerate(self._instances):
            if instance.events is None:
                return
            for event in instance.events.drain():
                self.scheduler.apply(number, event)
