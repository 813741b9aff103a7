"""KV caches that grow on GPUs under a scheduler, epoch by epoch: the study of MELL (§VIII).

In every epoch the running requests report their size at its end, so that room exists before the tokens are written;
ended and new requests are reported with them. All requests decode at one speed,
whatever their GPU: so each policy gets the same sizes at the same times, and a lower bound holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.policy.mell import Plan, RequestId
from kvpool.sim.clock import Clock
from kvpool.sim.workload import Arrival

__all__ = ["Epoch", "Outcome", "Scheduler", "demand", "replay", "served"]


class Scheduler(Protocol):
    """The interface of `Mell` and the baselines."""

    @property
    def gpus(self) -> Mapping[int, int]:
        """Active GPUs, by number, and the tokens in use on each."""

    @property
    def gpu_count(self) -> int:
        """How many GPUs are active."""

    def requests(self, gpu: int) -> list[RequestId]:
        """The requests of an active GPU."""

    def batch(
        self,
        departures: Iterable[RequestId] = (),
        growths: Iterable[tuple[RequestId, int]] = (),
        arrivals: Iterable[tuple[RequestId, int]] = (),
    ) -> Plan:
        """Departures, growth and arrivals of an epoch."""


@dataclass(frozen=True)
class Epoch:
    """The operations at the beginning of an epoch, by request number and tokens; the same for every policy."""

    departures: list[int]
    growths: list[tuple[int, int]]
    arrivals: list[tuple[int, int]]


@dataclass
class Outcome:
    """The results of a policy, epoch by epoch.

    Attributes:
        gpus: Active GPUs.
        item_moves: Moves; a group counts once.
        request_moves: Requests that moved.
        tokens_moved: KV cache that moved.
        redispatched: Requests that were stopped and prefilled again.
        tokens_redispatched: Tokens that are prefilled again for them.
    """

    gpus: list[int] = field(default_factory=list)
    item_moves: list[int] = field(default_factory=list)
    request_moves: list[int] = field(default_factory=list)
    tokens_moved: list[int] = field(default_factory=list)
    redispatched: list[int] = field(default_factory=list)
    tokens_redispatched: list[int] = field(default_factory=list)

    def add(self, gpus: int, plans: Sequence[Plan]) -> None:
        """Adds an epoch, which was planned in one batch or in several operations."""
        self.gpus.append(gpus)
        self.item_moves.append(sum(plan.item_moves for plan in plans))
        self.request_moves.append(sum(plan.request_moves for plan in plans))
        self.tokens_moved.append(sum(plan.tokens_moved for plan in plans))
        self.redispatched.append(sum(len(plan.redispatched) for plan in plans))
        self.tokens_redispatched.append(sum(move.tokens for plan in plans for move in plan.redispatched))


def demand(
    requests: Sequence[Arrival], capacity: int, tokens_s: float, epoch_s: float, epochs: int
) -> tuple[list[Epoch], list[dict[int, int]], int]:
    """The load that the requests make, epoch by epoch.

    A request begins in the epoch after its arrival, with its prompt and the tokens of that epoch.

    Args:
        requests: In any order; their places in the sequence are their numbers.
        capacity: C: requests that would become longer are refused.
        tokens_s: Speed of decoding, tokens a second.
        epoch_s: Seconds of an epoch.
        epochs: How many.

    Returns:
        Epochs; the sizes of all requests that run, for each of them; how many were refused.
    """
    clock = Clock()
    states: dict[int, int] = {}  # epochs that a request has run
    waiting: list[int] = []
    found: list[Epoch] = []
    sizes: list[dict[int, int]] = []
    running: dict[int, int] = {}
    refused = 0

    def size_of(number: int) -> int:
        generated = int(states[number] * tokens_s * epoch_s + 0.5)
        return requests[number].prompt + min(requests[number].response, max(1, generated))

    def tick() -> None:
        departures = [number for number in states if running[number] == sum(requests[number][1:])]
        for number in departures:
            del states[number], running[number]
        growths = []
        for number in states:
            states[number] += 1
            size = size_of(number)
            if size != running[number]:
                growths.append((number, size))
        arrivals = []
        for number in waiting:
            states[number] = 1
            arrivals.append((number, size_of(number)))
        waiting.clear()
        running.update(growths)
        running.update(arrivals)
        found.append(Epoch(departures, growths, arrivals))
        sizes.append(dict(running))

    def arriving(number: int) -> Callable[[], None]:
        return lambda: waiting.append(number)

    for number, request in enumerate(requests):
        if request.prompt + request.response > capacity:
            refused += 1
        else:
            clock.at(request.time_s, arriving(number))
    for epoch in range(1, epochs + 1):
        clock.at(epoch * epoch_s, tick)
    clock.run(epochs * epoch_s)
    return found, sizes, refused


def replay(
    epochs: Iterable[Epoch],
    scheduler: Scheduler,
    one_by_one: bool = False,
    watch: Callable[[Epoch, Plan], None] | None = None,
) -> Outcome:
    """Runs a scheduler through the epochs.

    Args:
        epochs: From `demand`.
        scheduler: Without GPUs so far.
        one_by_one: Whether each operation is planned singly, not the epoch as one batch.
        watch: Called with every plan.
    """
    outcome = Outcome()
    for epoch in epochs:
        if one_by_one:
            plans = [scheduler.batch(departures=(number,)) for number in epoch.departures]
            plans += [scheduler.batch(growths=(entry,)) for entry in epoch.growths]
            plans += [scheduler.batch(arrivals=(entry,)) for entry in epoch.arrivals]
        else:
            plans = [scheduler.batch(epoch.departures, epoch.growths, epoch.arrivals)]
        if watch is not None:
            for plan in plans:
                watch(epoch, plan)
        outcome.add(scheduler.gpu_count, plans)
    return outcome


def served(epochs: Iterable[Epoch], scheduler: Scheduler, fleet: int) -> tuple[int, int]:
    """How many requests a fleet that cannot be enlarged serves to their end, and how many it gives up (Fig 6).

    While the scheduler would need more than `fleet` GPUs, the newest request of the least used GPU is given up.
    """
    gone: set[int] = set()
    complete = 0
    for epoch in epochs:
        departures = [number for number in epoch.departures if number not in gone]
        complete += len(departures)
        scheduler.batch(departures, [entry for entry in epoch.growths if entry[0] not in gone], epoch.arrivals)
        while scheduler.gpu_count > fleet:
            least = min(scheduler.gpus, key=lambda gpu: scheduler.gpus[gpu])
            newest = max(int(str(request)) for request in scheduler.requests(least))
            gone.add(newest)
            scheduler.batch(departures=[newest])
    return complete, len(gone)
