"""A cluster in discrete events: the global scheduler in front, instances behind, links between them.

The scheduler with its trees and policies, and each instance's radix index, are real. Times are predicted: the cost
model predicts prefills and decoding steps from what the instance itself has cached, and transfers share links.

    arrival ─▶ route ─▶ queue ─▶ (fetch) ─▶ prefill ─▶ first token ─▶ decode ─▶ end          colocated
                                                           └▶ transfer ─▶ decode ─▶ end      prefill and decode apart

Memory does not grow with the number of requests: the simulator takes them from an iterator one by one, and keeps
nothing of a request that has ended. Same input, same output, byte for byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from kvpool.errors import ArgumentError, AuditError
from kvpool.index import EventStream
from kvpool.policy.cost import CostModel, KVTransfer, Link
from kvpool.policy.routing import Balance, GlobalScheduler, Kind, Policy, Request
from kvpool.sim.cache import Held, InstanceCache
from kvpool.sim.instance import Batching, Instance, Job
from kvpool.sim.links import Links
from kvpool.sim.loop import Loop
from kvpool.sim.measures import Measures
from kvpool.sim.requests import SimRequest
from kvpool.sim.times import CountedInBlocks, DecodeTimes

__all__ = ["Cluster", "ClusterSim"]

_TELL_EVERY: Final = 1000


@dataclass(frozen=True)
class Cluster:
    """The cluster to simulate.

    Attributes:
        model: Predicts prefills and steps of decoding of an instance.
        unit: Tokens for which an id of the workload stands: the block of this cluster.
        hbm_blocks: KV blocks in each instance's HBM.
        dram_blocks: Blocks in each instance's DRAM, for what HBM evicts.
        colocated: Instances that prefill and decode.
        prefill: Instances that only compute prompts; with them some must decode.
        decode: Instances that decode those prompts.
        policy: Makes the policy that chooses the instance for a prompt.
        link: Between any two instances; each instance sends one transfer and receives one at a time.
        fetch: Whether an instance fetches what another one holds if the scheduler says that it pays (eq. 2).
        learn: When the scheduler learns what an instance holds: at dispatch; from responses alone; or at dispatch and
            from its KV events, as `kvpool router` does.
        ttl_s: How long it keeps what it did not learn from events.
        balance: The scheduler's load cap. All instances are there from the start, so none is a newcomer.
        batching: The engines'.
    """

    model: CostModel
    unit: int
    hbm_blocks: int
    policy: Callable[[], Policy]
    dram_blocks: int = 0
    colocated: int = 0
    prefill: int = 0
    decode: int = 0
    link: Link = field(default_factory=lambda: Link(25e9, latency_s=1e-5))
    fetch: bool = False
    learn: Literal["response", "dispatch", "events"] = "dispatch"
    ttl_s: float | None = 300.0
    balance: Balance = field(default_factory=lambda: Balance(warmup_s=0.0))
    batching: Batching = field(default_factory=Batching)

    def __post_init__(self) -> None:
        if min(self.colocated, self.prefill, self.decode) < 0 or self.colocated + self.prefill < 1:
            raise ArgumentError(
                f"{self.colocated} colocated, {self.prefill} prefill and {self.decode} decode instances: at least one "
                "has to compute prompts"
            )
        if bool(self.prefill) != bool(self.decode):
            raise ArgumentError(
                f"{self.prefill} prefill and {self.decode} decode instances: neither can do without the other"
            )
        if self.unit < 1 or self.learn not in ("response", "dispatch", "events"):
            raise ArgumentError(f"unit is {self.unit}, at least 1; learn {self.learn!r}: response, dispatch, events")

    @property
    def instances(self) -> int:
        """All of them."""
        return self.colocated + self.prefill + self.decode


class ClusterSim:
    """Runs one workload through one cluster, once. Not thread-safe.

    Args:
        cluster: The cluster to simulate.
        skip: Requests at the start that are not measured, while caches fill.
        told: Called now and then with the number of requests that have ended and the virtual time.
    """

    def __init__(self, cluster: Cluster, *, skip: int = 0, told: Callable[[int, float], None] | None = None) -> None:
        self.cluster = cluster
        self.measures = Measures()
        self._skip, self._told = skip, told
        self._loop = Loop()
        self._links = Links(cluster.instances)
        model = cluster.model
        self._transfer = KVTransfer(cluster.link, model.model.kv_bytes_per_token, cluster.unit, calls_per_block=1.0)
        self._scheduler = GlobalScheduler(
            CountedInBlocks(model, cluster.unit),
            clock=lambda: self._loop.now,
            policy=cluster.policy(),
            transfer=self._transfer_in_blocks() if cluster.fetch else None,
            ttl_s=cluster.ttl_s,
            balance=cluster.balance,
            learn_at="response" if cluster.learn == "response" else "dispatch",
            holders_max=8 if cluster.fetch else 0,
        )
        self._kinds = (
            [Kind.COLOCATED] * cluster.colocated + [Kind.PREFILL] * cluster.prefill + [Kind.DECODE] * cluster.decode
        )
        self._streams: list[tuple[int, EventStream]] = []
        decode = DecodeTimes(model)
        self._instances = [self._instance(number, decode) for number in range(cluster.instances)]
        self._for_decode: list[deque[Job]] = [deque() for _ in self._instances]  # computed, no room where they decode
        self._coming = [0] * cluster.instances  # on their way to where they decode
        self._requests = [0] * cluster.instances

    def run(self, requests: Iterable[SimRequest]) -> Measures:
        """Runs until the last request has ended.

        Args:
            requests: In the order of their times.

        Raises:
            ArgumentError: A request comes before the one before it, or has no ids.
            AuditError: Blocks or requests were lost: a bug.
        """
        self.feed(requests)
        return self.finish()

    def feed(self, requests: Iterable[SimRequest]) -> None:
        """Runs until the last of these requests has arrived. More can follow. Raises as `run`."""
        loop = self._loop
        for request in requests:
            if request.time_s < loop.now:
                raise ArgumentError(f"a request of {request.time_s:g} s after one of {loop.now:g} s")
            loop.run_before(request.time_s)
            loop.events += 1
            self._send(request)

    def finish(self) -> Measures:
        """Runs until all requests have ended. Raises AuditError when blocks or requests were lost: a bug."""
        self._loop.run_before(float("inf"))
        return self._closed()

    @property
    def events(self) -> int:
        """The number of events so far."""
        return self._loop.events

    def audit(self, idle: bool = False) -> None:
        """Checks the blocks of all instances; raises AuditError when some are lost."""
        for instance in self._instances:
            instance.cache.audit(idle)

    # ---- set-up

    def _instance(self, number: int, decode: DecodeTimes) -> Instance:
        cluster, kind = self.cluster, self._kinds[number]
        cache = InstanceCache(cluster.hbm_blocks, cluster.dram_blocks)
        by_events = cluster.learn == "events"
        if by_events:
            self._streams.append((number, cache.subscribe()))
        self._scheduler.add_instance(number, kind, by_events=by_events)
        return Instance(
            number,
            self._loop,
            cache,
            cluster.model,
            decode,
            cluster.unit,
            cluster.batching,
            self._fetched if cluster.fetch else None,
            self._first_token,
            self._ended,
        )

    def _transfer_in_blocks(self) -> KVTransfer:
        """The cost of transfers for the scheduler, which counts in ids."""
        unit = self.cluster.unit
        return KVTransfer(self.cluster.link, unit * self._transfer.bytes_per_token, 1, calls_per_block=1.0)

    # ---- the way of a request

    def _send(self, request: SimRequest) -> None:
        measures, cluster = self.measures, self.cluster
        measures.arrived += 1
        measures.last_arrival_s = now = self._loop.now
        blocks = -(-(request.prompt + request.output) // cluster.unit)
        blocks = max(blocks, len(request.ids) + len(request.output_ids))
        if blocks > cluster.hbm_blocks:
            measures.refused += 1
            self._follow(request)
            return
        for number, stream in self._streams:
            for event in stream.drain():
                self._scheduler.apply(number, event)
        decision = self._scheduler.route(Request(request.ids, request.session))
        self._requests[decision.instance] += 1
        if decision.decode is not None:
            self._requests[decision.decode] += 1
        self._instances[decision.instance].submit(Job(request, measures.arrived - 1, now, decision, blocks))

    def _fetched(self, job: Job, have: int) -> tuple[int, float]:
        """The blocks to fetch from another instance before a prompt is computed, and when they arrive."""
        fetch, now = job.decision.fetch, self._loop.now
        if fetch is None or fetch.stop <= have:
            return 0, now
        # By now the other one may hold less than the scheduler believed.
        blocks = min(fetch.stop, self._instances[fetch.instance].cache.peek(job.request.ids)) - have
        if blocks <= 0:
            return 0, now
        seconds = self._transfer.time_s(blocks * self.cluster.unit)
        return blocks, self._links.send(now, fetch.instance, job.decision.instance, seconds)

    def _first_token(self, job: Job) -> bool:
        self._scheduler.first_token(job.decision.ticket)
        self._measure_first(job)
        target = job.decision.decode
        if target is None or job.request.output == 1:
            return True
        self._for_decode[target].append(job)
        self._hand_over(target)
        return False

    def _hand_over(self, target: int) -> None:
        """Sends an instance that decodes the requests that it has room for, in order."""
        waiting, instance, unit = self._for_decode[target], self._instances[target], self.cluster.unit
        while waiting and instance.room > self._coming[target]:
            job = waiting[0]
            request = job.request
            held = instance.cache.admit(request.ids, job.blocks)
            if held is None:
                return
            waiting.popleft()
            left, job.held = job.held, held
            self._coming[target] += 1
            missing = max(0, request.prompt - unit * held.cached)
            seconds = self._transfer.time_s(missing)
            end = self._links.send(self._loop.now, job.decision.instance, target, seconds)
            end += self.cluster.model.swap_in_s(unit * (held.cached - held.found))
            self.measures.sent_tokens += missing
            self._loop.at(end, self._handed_over, (job, left, target))

    def _handed_over(self, moved: tuple[Job, Held, int]) -> None:
        """Called when a request's KV has arrived where it decodes; releases it where it was computed."""
        job, left, target = moved
        source, instance = self._instances[job.decision.instance], self._instances[target]
        source.cache.release(left)
        source.wake()
        self._coming[target] -= 1
        assert job.held is not None  # admitted before it was sent
        instance.cache.store(job.held, job.request.ids)
        instance.join(job)

    def _ended(self, job: Job) -> None:
        request, held = job.request, job.held
        assert held is not None  # it ran
        at = job.decision.instance
        if job.decision.decode is not None and request.output > 1:
            at = job.decision.decode
        cache = self._instances[at].cache
        if len(request.output_ids):
            cache.store(held, np.concatenate([request.ids, request.output_ids]))
        cache.release(held)
        self._scheduler.finished(job.decision.ticket, request.output_ids)
        self._measure_end(job)
        if self._for_decode[at]:
            self._hand_over(at)
        self._follow(request)

    def _follow(self, request: SimRequest) -> None:
        """Schedules the session's next request."""
        if request.then is not None and (following := next(request.then, None)) is not None:
            self._loop.at(self._loop.now + following.time_s, self._send, following)

    # ---- what is counted

    def _measure_first(self, job: Job) -> None:
        if job.number < self._skip:
            return
        measures, request, held, unit = self.measures, job.request, job.held, self.cluster.unit
        assert held is not None
        measures.ttft_s.add(self._loop.now - job.sent_s)
        measures.prompt_tokens += request.prompt
        in_hbm = min(unit * held.found, request.prompt)
        measures.hbm_tokens += in_hbm
        measures.dram_tokens += min(unit * held.cached, request.prompt) - in_hbm
        measures.fetched_tokens += min(unit * job.fetched, request.prompt)

    def _measure_end(self, job: Job) -> None:
        measures, request, now = self.measures, job.request, self._loop.now
        measures.ended += 1
        measures.generated_tokens += request.output
        measures.end_s = now
        if self._told is not None and not measures.ended % _TELL_EVERY:
            self._told(measures.ended, now)
        if job.number < self._skip:
            return
        measures.jct_s.add(now - job.sent_s)
        measures.output_tokens += request.output
        if request.output > 1:
            measures.tpot_s.add((now - job.first_s) / (request.output - 1))

    def _closed(self) -> Measures:
        """Computes the final sums and checks that nothing was lost."""
        measures = self.measures
        self.audit(idle=True)
        if measures.ended + measures.refused != measures.arrived or self._scheduler.in_flight:
            raise AuditError(
                f"{measures.arrived} requests came, {measures.ended} ended and {measures.refused} were refused; "
                f"{self._scheduler.in_flight} are said to be under way"
            )
        end_s = max(measures.end_s, 1e-12)
        measures.instances = [
            {
                "kind": kind.value,
                "requests": requests,
                "prefill_busy": instance.prefill_s / end_s,
                "decode_busy": instance.decode_s / end_s,
                "longest_queue": instance.longest_queue,
            }
            for kind, requests, instance in zip(self._kinds, self._requests, self._instances, strict=True)
        ]
        measures.link_busy_s, measures.link_waited_s = self._links.busy_s, self._links.waited_s
        measures.events = self._loop.events
        return measures
