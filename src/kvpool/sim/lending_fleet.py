"""A fleet of engines with one queue, in discrete events: lending, beside the designs that it is compared with.

    lending      engines of few GPUs, which borrow blocks when memory runs short, and send queries to them
    independent  the same engines without it: what does not fit an engine is refused (vLLM-v1)
    migrating    the same; a sequence that outgrows its engine moves to one with room (Llumnix)
    one          one engine over all GPUs, by tensor parallelism (vLLM-v2) or with pipeline stages

All have one clock, cost model, queue and batching. Requests are taken first come, first served: no later one goes
ahead of one that waits for memory. The same arguments give the same results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.policy.cost import Link
from kvpool.sim.lending_engine import Batching, Engine, Job
from kvpool.sim.lending_market import Market, Rules
from kvpool.sim.lending_memory import Memory
from kvpool.sim.lending_times import StepTimes
from kvpool.sim.loop import Loop
from kvpool.sim.workload import Arrival

__all__ = ["FleetOutcome", "LendingFleet", "Machines"]

_GIVEN_UP: Final = 50  # times that a request may lose its blocks
_WATERMARK: Final = 0.01  # of an engine's blocks stay free when a prompt begins


@dataclass(frozen=True)
class Machines:
    """The engines and what lies between them.

    Attributes:
        engines: How many.
        times: Of a step of each.
        blocks: Of each.
        near: Between two engines of a machine.
        far: Between engines of different machines.
        per_host: Engines of a machine.
    """

    engines: int
    times: StepTimes
    blocks: int
    near: Link
    far: Link
    per_host: int = 8

    def __post_init__(self) -> None:
        if self.engines < 1 or self.blocks < 1 or self.per_host < 1:
            raise ArgumentError(f"{self.engines} engines of {self.blocks} blocks: at least one of each")


@dataclass
class FleetOutcome:
    """What a fleet did.

    Attributes:
        jobs: Every request that was not refused, in the order of arrival.
        refused: Requests that are longer than the fleet can hold.
        given_up: Requests that lost their blocks again and again.
        stopped: How often a sequence lost its blocks and was computed again.
        moved: Sequences that went to another engine.
        end_s: When the last token was there.
        made: Tokens in each second.
        copied_bytes: KV that was copied between engines when it was written already.
        stall_s: Seconds that copies held steps up.
        remote_s: Seconds that steps waited for creditors.
        busy_s: Seconds that all engines computed.
        away: The part of all blocks in use that lay with creditors, at every heartbeat.
        market: Counts of the lending; None without it.
    """

    jobs: list[Job] = field(default_factory=list)
    refused: int = 0
    given_up: int = 0
    stopped: int = 0
    moved: int = 0
    end_s: float = 0.0
    made: dict[int, int] = field(default_factory=dict)
    copied_bytes: int = 0
    stall_s: float = 0.0
    remote_s: float = 0.0
    busy_s: float = 0.0
    away: list[float] = field(default_factory=list)
    market: Market | None = None

    @property
    def done(self) -> list[Job]:
        """Requests that have all their tokens."""
        return [job for job in self.jobs if job.end_s]

    @property
    def requests_s(self) -> float:
        """Requests a second, from the first arrival to the last token."""
        return len(self.done) / self.end_s if self.end_s else 0.0

    @property
    def output_tokens_s(self) -> float:
        """Generated tokens a second."""
        return sum(job.output for job in self.done) / self.end_s if self.end_s else 0.0

    @property
    def latency_s(self) -> float:
        """From arrival to the last token, the mean."""
        return sum(job.end_s - job.arrival_s for job in self.done) / len(self.done) if self.done else 0.0


class LendingFleet:
    """Runs requests on engines. Use it once.

    Args:
        machines: The engines.
        batching: How they batch.
        rules: How they lend; None: not at all.
        migrate: Whether sequences that find no block move to an engine with room.
        seed: Of the searches for creditors.
        heartbeat_s: Seconds from one to the next.
        watch: Called at every heartbeat with all memories, for tests.
    """

    def __init__(
        self,
        machines: Machines,
        batching: Batching | None = None,
        rules: Rules | None = None,
        migrate: bool = False,
        seed: int = 0,
        heartbeat_s: float = 1.0,
        watch: Callable[[Sequence[Memory]], None] | None = None,
    ) -> None:
        if rules is not None and migrate:
            raise ArgumentError("a fleet lends or migrates, not both")
        self._machines, self._batching, self._rules = machines, batching or Batching(), rules
        self._migrate, self._heartbeat_s, self._watch = migrate, heartbeat_s, watch
        self._loop = Loop()
        self._queue: deque[Job] = deque()
        self._left = 0
        self._out = FleetOutcome()
        memories = [self._memory(member) for member in range(1, machines.engines + 1)]
        self._engines = {
            memory.member: Engine(self._loop, machines.times, memory, self._batching, self) for memory in memories
        }
        if rules is not None:
            self._out.market = Market({each.member: each for each in memories}, rules, seed, self._copied)

    def _memory(self, member: int) -> Memory:
        machines, rules = self._machines, self._rules
        host = f"host-{(member - 1) // machines.per_host}"
        if rules is None:
            return Memory(member, machines.blocks, host=host)
        lend_max, reserve = int(rules.lend_part * machines.blocks), int(rules.reserve_part * machines.blocks)
        return Memory(member, machines.blocks, lend_max, reserve, host)

    @property
    def engine_count(self) -> int:
        """How many engines it has."""
        return self._machines.engines

    @property
    def tokens(self) -> int:
        """Tokens for which an engine has memory."""
        return (self._machines.blocks - self._watermark) * self._batching.block_tokens

    @property
    def context_max(self) -> int:
        """Tokens of the longest request that is not refused."""
        machines = self._machines
        blocks = machines.blocks - self._watermark
        if self._rules is not None:
            keeps = max(int(self._rules.reserve_part * machines.blocks), machines.blocks - self._lend_max)
            if machines.engines > 1:
                staged = 2 * self._rules.chunk + 2 * self._rules.leaf  # in leaves at home, and to the last leaf
                blocks += (machines.engines - 1) * (machines.blocks - keeps) - staged
        return blocks * self._batching.block_tokens

    def run(self, requests: Sequence[Arrival]) -> FleetOutcome:
        """Runs until the last request has its last token."""
        for number, request in enumerate(requests):
            if request.prompt + request.response + 1 > self.context_max:
                self._out.refused += 1
                continue
            job = Job(number, request.time_s, request.prompt, request.response)
            self._out.jobs.append(job)
            self._left += 1
            self._loop.at(request.time_s, self._arrived, job)
        if self._left:
            self._loop.at(self._heartbeat_s, self._beat, None)
        self._loop.run_before(float("inf"))
        out = self._out
        out.end_s = max((job.end_s for job in out.jobs), default=0.0)
        out.remote_s = sum(engine.remote_s for engine in self._engines.values())
        out.busy_s = sum(engine.busy_s for engine in self._engines.values())
        return out

    # ---- what engines ask

    @property
    def engines(self) -> Mapping[int, Engine]:
        """By member."""
        return self._engines

    def link(self, a: int, b: int) -> Link:
        """Between two members."""
        per_host = self._machines.per_host
        return self._machines.near if (a - 1) // per_host == (b - 1) // per_host else self._machines.far

    def make_room(self, engine: Engine, blocks: int) -> bool:
        """Lends, or moves a sequence away."""
        if self._out.market is not None:
            return self._out.market.make_room(engine.member, blocks)
        return self._migrate and self._move_one(engine, blocks)

    def stopped(self, engine: Engine, job: Job) -> None:
        """It goes first in the queue, unless it has lost its blocks too often."""
        self._out.stopped += 1
        if job.stopped < _GIVEN_UP:
            self._queue.appendleft(job)
        else:
            self._out.given_up += 1
            self._left -= 1

    def ended(self, engine: Engine, job: Job) -> None:
        """Counts it."""
        self._left -= 1

    def stepped(self, engine: Engine, tokens: int, left: bool) -> None:
        """Counts tokens. What waits is tried again if there can be room for it."""
        second = int(self._loop.now)
        self._out.made[second] = self._out.made.get(second, 0) + tokens
        if left:
            self._dispatch()

    def give_back(self, debtor: int, given: Mapping[int, int]) -> None:
        """Room that a debtor gives up."""
        for creditor, blocks in given.items():
            self._engines[creditor].memory.returned(debtor, blocks)

    # ---- events

    def _arrived(self, job: Job) -> None:
        self._queue.append(job)
        self._dispatch()

    def _beat(self, _: None) -> None:
        engines, news = self._engines.values(), True
        if self._out.market is not None:
            news = self._out.market.beat(waiting=bool(self._queue))
            used = sum(each.memory.blocks - each.memory.free for each in engines)
            away = sum(sum(each.memory.debts.values()) for each in engines)
            self._out.away.append(away / used if used else 0.0)
        if self._watch is not None:
            self._watch([engine.memory for engine in engines])
        if news:
            self._dispatch()
        for engine in engines:
            engine.wake()
        if self._left:
            self._loop.at(self._loop.now + self._heartbeat_s, self._beat, None)

    def _dispatch(self) -> None:
        while self._queue and self._begin(self._queue[0]):
            pass

    def _begin(self, job: Job) -> bool:
        """Begins the first of the queue at the engine with most free blocks that has room or can borrow it."""
        free = sorted(
            (engine for engine in self._engines.values() if engine.accepts),
            key=lambda each: (-each.memory.free, each.member),
        )
        if not free:
            return False
        engine = free[0]
        blocks = engine.blocks_of(job.tokens + 1)
        if blocks + self._watermark <= engine.memory.free:
            engine.memory.grow(job.number, blocks)
        elif self._out.market is None or not self._out.market.place(engine.member, job.number, blocks, self._watermark):
            return False
        self._queue.popleft()
        engine.join(job)
        return True

    @property
    def _watermark(self) -> int:
        return int(_WATERMARK * self._machines.blocks)

    @property
    def _lend_max(self) -> int:
        return int(self._rules.lend_part * self._machines.blocks) if self._rules is not None else 0

    def _move_one(self, engine: Engine, blocks: int) -> bool:
        """Moves the shortest sequence that is long enough to the engine with most room."""
        others = [other for other in self._engines.values() if other is not engine]
        if not others:
            return False
        target = max(others, key=lambda each: (each.memory.free, -each.member))
        stored = engine.memory.sequences
        fits = [
            job for job in engine.running
            if blocks <= stored[job.number].blocks <= target.memory.free - self._watermark
        ]  # fmt: skip
        if not fits or not target.accepts:
            return False
        job = min(fits, key=lambda each: stored[each.number].blocks)
        moving = stored[job.number]
        engine.running.remove(job)
        engine.memory.end(job.number)
        target.memory.adopt(moving)
        self._copied(engine.member, target.member, moving.blocks)
        self._out.moved += 1
        target.running.append(job)
        target.wake()
        return True

    def _copied(self, member: int, other: int, blocks: int) -> None:
        """KV goes between two engines; the next step of the first waits for it."""
        copied = blocks * self._batching.block_tokens * self._machines.times.kv_bytes
        seconds = self.link(member, other).time_s(copied)
        self._engines[member].stall_s += seconds
        self._out.stall_s += seconds
        self._out.copied_bytes += copied
