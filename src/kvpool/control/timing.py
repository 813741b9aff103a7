"""How things are timed that a profile is made of.

Everything is measured in several rounds, each time in another order, and the median counts: what disturbs the machine
for a while disturbs none of them more than the others. One core is timed by the processor time of its thread, which is
the wall time of an idle core; several cores, and operations that wait, by the wall time.
"""

from __future__ import annotations

import platform
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any, TypeAlias

from kvpool.control.numpy_rank import NumpyRank
from kvpool.control.torch_rank import TorchRank
from kvpool.policy.cost import Machine, ModelShape

__all__ = ["Rank", "SelfTimed", "clock_of", "machine_of", "measure", "rank_of"]

Rank: TypeAlias = NumpyRank | TorchRank

_RUN_S_MIN = 300e-6  # a shorter function runs several times within one measurement
_RUNS_MAX = 50
_SELF_TIMED_MAX = 5


class SelfTimed(ABC):
    """Something that has to be set up and undone for each run, and says itself how long the rest took."""

    @abstractmethod
    def __call__(self, run: int) -> float:
        """Seconds."""


def rank_of(model: ModelShape, tokens_max: int, block_tokens: int, torch: Any, device: str) -> Rank:
    """What computes: NumPy, or the PyTorch that is given. Raises Unsupported for a dtype that it lacks."""
    if torch is None:
        return NumpyRank(model, tokens_max, block_tokens=block_tokens)
    return TorchRank(torch, device, model, tokens_max, block_tokens=block_tokens)


def clock_of(rank: Rank, units: int) -> Callable[[], float]:
    """Seconds from any start, when all that was begun is done."""
    on_cpu = isinstance(rank, NumpyRank) or rank.device.type == "cpu"

    def clock() -> float:
        rank.wait()
        return thread_time() if on_cpu and units == 1 else perf_counter()

    return clock


def machine_of(rank: Rank, units: int, torch: Any, device: str) -> Machine:
    """Where it computes."""
    name = _cpu_name() if torch is None or device == "cpu" else str(torch.cuda.get_device_name(device))
    return Machine(name, rank.name, units)


def measure(cases: Sequence[Callable[[int], object]], rounds: int, clock: Callable[[], float]) -> list[float]:
    """The median of the rounds' times for each case; seconds.

    Args:
        cases: Each is called with numbers that count up, so that each run may take other weights.
        rounds: How often everything is measured; 1 or more.
        clock: As `clock_of` has it.
    """
    runs = [max(1, min(_RUNS_MAX, round(_RUN_S_MIN / _time_s(case, 1, clock)))) for case in cases]  # this also warms up
    times: list[list[float]] = [[] for _ in cases]
    order = list(range(len(cases)))
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for at in order:
            times[at].append(_time_s(cases[at], runs[at], clock))
    return list(map(median, times))


def _time_s(case: Callable[[int], object], runs: int, clock: Callable[[], float]) -> float:
    if isinstance(case, SelfTimed):
        return median(case(i) for i in range(min(runs, _SELF_TIMED_MAX)))
    start = clock()
    for i in range(runs):
        case(i)
    return max((clock() - start) / runs, 1e-9)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
