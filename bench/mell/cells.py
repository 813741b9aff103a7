"""The settings of the study of MELL: GPUs, workloads, policies, and what is measured of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.policy import mell
from kvpool.sim.packing import Epoch, Outcome, Scheduler, demand
from kvpool.sim.workload import LMSYS_PROMPT, LMSYS_RESPONSE, Arrival, azure, long_tailed, poisson, zipped

TRACES = Path(os.environ.get("KVPOOL_TRACES", "../shared/traces"))
AZURE = TRACES / "azure2023_conv.csv.xz"
EPOCH_S = 1.0
TIMES_TEN = 10  # the paper makes LMSYS conversations ten times as long
SIGMA = 1.0  # of the logarithm of lengths: a median of 0.61 of the mean


@dataclass(frozen=True)
class Hardware:
    """A model on a GPU.

    Attributes:
        name: For a person.
        kv_bytes: Of one token.
        room_gb: What is left for KV cache beside the weights.
        step_s: Of decoding one token, assumed: weights and KV cache read once, and as much again in overheads.
        per_machine: GPUs.
        knee: Tokens in a step up to which reading the weights takes longer than computing: FLOP/s over bytes/s.
    """

    name: str
    kv_bytes: int
    room_gb: float
    step_s: float
    per_machine: int
    knee: int

    @property
    def capacity(self) -> int:
        """C in tokens."""
        return int(self.room_gb * 1e9 / self.kv_bytes)


A100 = Hardware("LLaMA-13B on A100-40GB", 2 * 40 * 5120 * 2, 12.0, 0.030, 4, 200)
RTX4090 = Hardware("LLaMA-7B on 4090-24GB", 2 * 32 * 4096 * 2, 9.0, 0.025, 8, 164)


@dataclass(frozen=True)
class Workload:
    """Requests of one seed on one hardware, epoch by epoch; what is measured begins after `warm_up` epochs."""

    hardware: Hardware
    name: str
    requests: Sequence[Arrival]
    seconds: int
    warm_up: int

    @cached_property
    def _demand(self) -> tuple[list[Epoch], list[dict[int, int]], int]:
        return demand(self.requests, self.hardware.capacity, EPOCH_S / self.hardware.step_s, EPOCH_S, self.seconds)

    @property
    def epochs(self) -> list[Epoch]:
        return self._demand[0]

    @property
    def refused(self) -> int:
        """Requests that are longer than a GPU."""
        return self._demand[2]

    @cached_property
    def bounds(self) -> npt.NDArray[np.int64]:
        """No placement uses fewer GPUs, epoch by epoch."""
        sizes = self._demand[1]
        return np.array([mell.lower_bound(each.values(), self.hardware.capacity) for each in sizes[self.warm_up :]])

    @cached_property
    def used(self) -> npt.NDArray[np.int64]:
        """Tokens of all requests, epoch by epoch."""
        return np.array([sum(each.values()) for each in self._demand[1][self.warm_up :]])


def lmsys(times: npt.NDArray[np.float64], rng: np.random.Generator) -> list[Arrival]:
    """Requests of LMSYS's mean lengths, times ten."""
    prompts, responses = (
        long_tailed(TIMES_TEN * mean, SIGMA, len(times), rng).tolist() for mean in (LMSYS_PROMPT, LMSYS_RESPONSE)
    )
    return zipped(times, prompts, responses)


def poisson_workload(hardware: Hardware, rate: float, seed: int, seconds: int, warm_up: int) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(hardware, f"Poisson {rate:g}/s", lmsys(poisson(rate, seconds, rng), rng), seconds, warm_up)


def azure_workload(hardware: Hardware, seed: int, seconds: int, warm_up: int, own_lengths: bool) -> Workload:
    """Arrivals of the Azure conversation trace, a different part for each seed, with LMSYS's lengths or its own."""
    trace = azure(AZURE)
    start = seed * 300.0
    part = [request for request in trace if start <= request.time_s < start + seconds]
    part = [request._replace(time_s=request.time_s - start) for request in part]
    if own_lengths:
        return Workload(hardware, "Azure, own lengths", part, seconds, warm_up)
    times = np.array([request.time_s for request in part])
    return Workload(hardware, "Azure arrivals", lmsys(times, np.random.default_rng(seed)), seconds, warm_up)


def policies(workload: Workload, pairs: int = 1, never_more: bool = True) -> dict[str, Callable[[], Scheduler]]:
    """Those that are compared; `pairs` is how many GPUs the balancer levels in an epoch."""
    capacity, requests = workload.hardware.capacity, workload.requests

    def final(number: mell.RequestId) -> int:
        return sum(requests[int(str(number))][1:])

    return {
        "MELL": lambda: mell.Mell(capacity, mell.Settings(slack=0, never_more=never_more)),
        "BF": lambda: mell.BestFit(capacity),
        "WF": lambda: mell.WorstFit(capacity),
        "LB": lambda: mell.LoadBalance(capacity, pairs=pairs),
        "LB, drains at 95 %": lambda: mell.LoadBalance(capacity, scale_in=0.95, pairs=pairs),
        "BF, reserves": lambda: mell.BestFit(capacity, mell.Overflow.RESERVE, final),
    }


def measured(workload: Workload, outcome: Outcome) -> dict[str, float]:
    """Figures of one run, after the warm-up."""
    since = workload.warm_up
    gpus = np.array(outcome.gpus[since:])
    seconds = len(gpus) * EPOCH_S
    return {
        "gpus": float(gpus.mean()),
        "bound": float(workload.bounds.mean()),
        "over_bound": 100 * float(gpus.mean() / workload.bounds.mean() - 1),
        "peak_over_bound": 100 * float(gpus.max() / workload.bounds.max() - 1),
        "utilisation": 100 * float(workload.used.sum() / (workload.hardware.capacity * gpus.sum())),
        "utilisation_of_bound": 100 * float(workload.used.sum() / (workload.hardware.capacity * workload.bounds.sum())),
        "moves_s": sum(outcome.item_moves[since:]) / seconds,
        "request_moves_s": sum(outcome.request_moves[since:]) / seconds,
        "moved_gb_s": sum(outcome.tokens_moved[since:]) * workload.hardware.kv_bytes / 1e9 / seconds,
        "redispatched_s": sum(outcome.redispatched[since:]) / seconds,
    }


def over_seeds(runs: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure."""
    return {
        key: {
            "median": float(np.median([run[key] for run in runs])),
            "min": min(run[key] for run in runs),
            "max": max(run[key] for run in runs),
        }
        for key in runs[0]
    }
