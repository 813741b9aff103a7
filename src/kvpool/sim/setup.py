"""A simulation as a user describes it: names, gigabytes and GPUs, made into a cluster and a workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from kvpool.errors import ArgumentError
from kvpool.policy import cost, routing
from kvpool.sim.cluster import Cluster, ClusterSim
from kvpool.sim.generators import PRESETS, generate
from kvpool.sim.hardware import GPUS, MODELS, Gpu, kv_room_gb, roofline
from kvpool.sim.instance import Batching
from kvpool.sim.measures import Measures
from kvpool.sim.requests import Workload
from kvpool.sim.traces import open_trace

__all__ = ["POLICIES", "Setup"]

POLICIES: Final[Mapping[str, Callable[[], routing.Policy]]] = {
    "least-load": routing.LeastLoad,
    "session-id": routing.SessionId,
    "longest-prefix": routing.LongestPrefix,
    "queue-plus-exec": routing.QueuePlusExec,
    "keep-hits": routing.KeepHits,
}
_THRIFTY: Final[Mapping[str, Callable[[float], routing.Policy]]] = {
    "keep-hits": routing.KeepHits,
    "queue-plus-exec": routing.QueuePlusExec,
}
_RATE: Final = 4.0
_REQUESTS: Final = 20_000
_WHOLE_TOKENS: Final = 8192  # of prompts that are computed together, where they are not cut into chunks
_WHOLE_REQUESTS: Final = 256  # at a time, likewise
_MOST: Final = 1e9  # bounds gigabytes and requests a second: more is a mistake, and would overflow


@dataclass(frozen=True)
class Setup:
    """Everything about one simulation.

    Attributes:
        workload: A name of `generators.PRESETS`; None with a trace.
        trace: A recorded workload.
        policy: A name of POLICIES.
        gpus: All GPUs; `tp` of them make an instance. Not with `prefill` and `decode`.
        prefill: Instances that compute prompts only.
        decode: Instances that decode those prompts.
        tp: GPUs of an instance.
        model: A name of `hardware.MODELS`.
        hardware: A name of `hardware.GPUS`.
        profile: A measured cost model of one rank, in place of the roofline of `model` on `hardware`.
        hbm_gb: HBM for KV, of each GPU, 10^9 bytes; None: what the weights leave.
        dram_gb: The host's DRAM for KV, for each GPU, 10^9 bytes.
        link_gb_s: Between instances, 10^9 bytes a second and GPU; None: the hardware's.
        block_tokens: Tokens of a block; None: the trace's, or 16.
        rate: Mean requests a second; None: the trace's, or 4.
        rate_scale: Multiplies the rate.
        requests: The most requests of a trace, or exactly as many of a synthetic workload; None: all of a trace, or
            20,000.
        skip: Requests at the start that are not measured; fewer than there are.
        seed: Determines everything that is drawn.
        fetch: Whether instances fetch prefixes from each other where it pays.
        learn: As in `Cluster`.
        ttl_s: As in `Cluster`; 0: forever.
        cap: The load cap of the scheduler, as in `routing.Balance`.
        thrift: As in `routing.KeepHits` and `routing.QueuePlusExec`; for no other policy.
        chunked: As in `Batching`.
        batch_tokens: As in `Batching`; None: as vLLM's server has it for the hardware, and 8,192 without chunks.
        batch_requests: As in `Batching`; None: as vLLM's server has it for the hardware, but no more than
            `batch_tokens`, and 256 without chunks.
    """

    workload: str | None = "chat"
    trace: Path | None = None
    policy: str = "keep-hits"
    gpus: int = 8
    prefill: int = 0
    decode: int = 0
    tp: int = 1
    model: str = "llama-3-8b"
    hardware: str = "A100-80GB"
    profile: cost.CostModel | None = None
    hbm_gb: float | None = None
    dram_gb: float = 0.0
    link_gb_s: float | None = None
    block_tokens: int | None = None
    rate: float | None = None
    rate_scale: float = 1.0
    requests: int | None = None
    skip: int = 0
    seed: int = 0
    fetch: bool = False
    learn: Literal["response", "dispatch", "events"] = "dispatch"
    ttl_s: float = 300.0
    cap: float = routing.Balance.cap
    thrift: float | None = None
    chunked: bool = True
    batch_tokens: int | None = None
    batch_requests: int | None = None

    def __post_init__(self) -> None:
        if (self.workload is None) == (self.trace is None):
            raise ArgumentError("a simulation has a trace or a workload: one of them")
        for name, value, known in (
            ("model", self.model, MODELS),
            ("hardware", self.hardware, GPUS),
            ("policy", self.policy, POLICIES),
            ("workload", self.workload or "chat", PRESETS),
        ):
            if value not in known:
                raise ArgumentError(f"{name} {value!r} is not known; known are {', '.join(known)}")
        if min(self.prefill, self.decode, self.seed) < 0:
            raise ArgumentError(f"prefill {self.prefill}, decode {self.decode} and seed {self.seed} must be at least 0")
        if self.tp < 1 or self.gpus < 1:
            raise ArgumentError(f"{self.gpus} GPUs, {self.tp} for an instance: at least 1 of each")
        if not self.prefill and self.gpus % self.tp:
            raise ArgumentError(f"{self.gpus} GPUs do not divide into instances of {self.tp}")
        for name in ("hbm_gb", "dram_gb", "link_gb_s", "rate", "rate_scale"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _MOST:
                raise ArgumentError(f"{name} is {value}; it must be a number from 0 to {_MOST:g}")
        if (self.hbm_gb is not None and not self.hbm_gb > 0) or self.skip < 0:
            raise ArgumentError(f"hbm_gb {self.hbm_gb} must be above 0, skip {self.skip} at least 0")
        if not self.rate_scale > 0 or (self.rate is not None and not self.rate > 0):
            raise ArgumentError(f"rate {self.rate} and rate_scale {self.rate_scale} must be above 0")
        if self.requests is not None and self.requests < 1:
            raise ArgumentError(f"requests is {self.requests}; at least 1 is needed")
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ArgumentError(f"block_tokens is {self.block_tokens}; at least 1 is needed")
        most = self.requests or (_REQUESTS if self.trace is None else None)
        if most is not None:
            self.check_skip(most)
        if not 0 <= self.ttl_s <= _MOST:
            raise ArgumentError(f"ttl_s is {self.ttl_s}; it must be from 0 to {_MOST:g}")
        if not self.cap >= 1:
            raise ArgumentError(f"cap is {self.cap}; it must be at least 1")
        if self.thrift is not None and self.policy not in _THRIFTY:
            raise ArgumentError(
                f"thrift is {self.thrift:g}; it is of the policies {' and '.join(_THRIFTY)}, not of {self.policy}"
            )
        self._policy()  # checks the thrift
        if self.link_gb_s is not None and not self.link_gb_s > 0:
            raise ArgumentError(f"link_gb_s is {self.link_gb_s}; it must be above 0")

    # ---- derived values

    @property
    def gpu(self) -> Gpu:
        """One device."""
        return GPUS[self.hardware]

    @property
    def gpu_count(self) -> int:
        """All GPUs."""
        return (self.prefill + self.decode) * self.tp if self.prefill or self.decode else self.gpus

    @cached_property
    def cost_model(self) -> cost.CostModel:
        """The cost model of an instance."""
        if self.profile is not None:
            return self.profile.spread(cost.Parallel(tp=self.tp))
        return roofline(MODELS[self.model], self.gpu, self.tp)

    @property
    def batching(self) -> Batching:
        """How the engines batch. Raises ArgumentError as `Batching` does."""
        tokens, requests = self.batch_tokens, self.batch_requests
        if tokens is None:
            tokens = self.gpu.batch_tokens if self.chunked else _WHOLE_TOKENS
        if requests is None:
            requests = min(self.gpu.batch_requests, max(1, tokens)) if self.chunked else _WHOLE_REQUESTS
        return Batching(tokens, requests, self.chunked)

    @property
    def hbm_gb_each(self) -> float:
        """HBM for KV, of each GPU."""
        if self.hbm_gb is not None:
            return self.hbm_gb
        return kv_room_gb(self.cost_model.model, self.gpu, self.tp) / self.tp

    def make_workload(self) -> Workload:
        """Raises ArgumentError as `open_trace` and `generate` do."""
        if self.trace is not None:
            return open_trace(
                self.trace,
                block_tokens=self.block_tokens,
                rate=self.rate,
                rate_scale=self.rate_scale,
                limit=self.requests,
                seed=self.seed,
            )
        assert self.workload is not None  # checked
        return generate(
            self.workload,
            rate=(self.rate or _RATE) * self.rate_scale,
            requests=self.requests or _REQUESTS,
            seed=self.seed,
            block_tokens=self.block_tokens or 16,
        )

    def make_cluster(self, unit: int) -> Cluster:
        """A cluster whose blocks have `unit` tokens. Raises ArgumentError if an instance has no room for a block."""
        block_bytes = unit * self.cost_model.model.kv_bytes_per_token
        hbm, dram = (int(gb * self.tp * 1e9 / block_bytes) for gb in (self.hbm_gb_each, self.dram_gb))
        if hbm < 1:
            raise ArgumentError(
                f"{self.hbm_gb_each:g} GB for each GPU hold no block: {unit} tokens of KV are {block_bytes / 1e9:g} GB"
            )
        link_gb_s = self.link_gb_s or self.gpu.net_bytes_per_s / 1e9
        return Cluster(
            self.cost_model,
            unit,
            hbm,
            self._policy,
            dram_blocks=dram,
            colocated=0 if self.prefill or self.decode else self.gpus // self.tp,
            prefill=self.prefill,
            decode=self.decode,
            link=cost.Link(link_gb_s * 1e9 * self.tp, latency_s=1e-5),
            fetch=self.fetch,
            learn=self.learn,
            ttl_s=self.ttl_s or None,
            balance=routing.Balance(cap=self.cap, warmup_s=0.0),
            batching=self.batching,
        )

    def _policy(self) -> routing.Policy:
        if self.thrift is not None:
            return _THRIFTY[self.policy](self.thrift)
        return POLICIES[self.policy]()

    def run(self, told: Callable[[int, float], None] | None = None) -> Measures:
        """Simulates it. Same setup, same measures.

        Args:
            told: As in `ClusterSim`.

        Raises:
            ArgumentError: As `make_workload` and `make_cluster` do; a row of the trace is wrong; or the trace is so
                short that all its requests are skipped.
        """
        workload = self.make_workload()
        self.check_sessions(workload)
        cluster = self.make_cluster(workload.block_tokens)
        measures = ClusterSim(cluster, skip=self.skip, told=told).run(workload.start())
        self.check_skip(measures.arrived)
        return measures

    def check_sessions(self, workload: Workload) -> None:
        """Raises ArgumentError if the policy goes by sessions and the workload's first request is of none."""
        if self.policy != "session-id":
            return
        first = next(iter(workload.start()), None)
        if first is not None and first.session is None:
            raise ArgumentError(
                f"{workload.name}: row 1 names no session, which the policy session-id goes by: choose another policy"
            )

    def check_skip(self, requests: int) -> None:
        """Raises ArgumentError if `skip` leaves none of the requests to measure."""
        if self.skip >= requests:
            raise ArgumentError(f"skip is {self.skip} of {requests} requests: nothing would be measured")

    def of_size(self, factor: int) -> Setup:
        """The smallest cluster of its kind, `factor` times: one instance, or as many that prefill and decode."""
        if self.prefill:
            return replace(self, prefill=self.prefill * factor, decode=self.decode * factor)
        return replace(self, gpus=self.tp * factor)
