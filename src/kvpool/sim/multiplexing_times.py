"""What jobs of several models take on the same GPUs, alone and beside each other (MuxServe §2.4, Fig 3).

A job has a share of the compute. Alone, with all of the bandwidth, a step takes

    time = max(launches, compute / share + memory / min(1, share / 0.4) + calls)

since 0.4 of the units read as fast as all of them. Jobs that run beside each other have the shares that a scheduler
gave them; but there is only one bandwidth. If together they would read more than that, all reads are slowed down by one
factor, so that the reads of all jobs are exactly what the memory gives. Launches are done by the host: a step whose
launches take longest leaves the GPU idle meanwhile, for other jobs.

The parts of a step come from the cost model, split as `kvpool.policy.multiplexing.CostTiming` slows them down. Two
things differ: compute is divided by the share, without whole waves of thread blocks; and the requests of a batch share
one call of attention, which the cost model counts for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

from kvpool.policy import cost
from kvpool.policy.cost import OPERATORS
from kvpool.policy.cost.operators import EACH_PROMPT, NEW_2, ONE
from kvpool.policy.multiplexing import BANDWIDTH_SHARE

__all__ = ["NO_LAUNCHES", "JobTimes", "Launches", "Parts", "Ring", "alone_s", "slowdown"]

_INFINITE: Final = float("inf")
_STEPS_MAX: Final = 60  # towards the common factor
_NEAR: Final = 1e-7  # of the bandwidth
_FAR: Final = 1 << 14  # tokens over which a slope is measured


class Parts(NamedTuple):
    """What a step consists of, in seconds.

    Attributes:
        compute_s: Arithmetic, with all of the units.
        memory_s: Reads, with all of the bandwidth.
        calls_s: Kernels that start, and ranks that wait for each other: independent of the share.
        launches_s: Of the host, meanwhile: the step takes at least this.
    """

    compute_s: float
    memory_s: float
    calls_s: float
    launches_s: float


class Launches(NamedTuple):
    """Seconds of the host for one layer of one step, whatever is in it.

    An engine without CUDA graphs starts each kernel from Python. Both are 0 for one that records its steps as graphs.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0


NO_LAUNCHES: Final = Launches()


class Ring(NamedTuple):
    """How the GPUs of a mesh add up their results.

    Attributes:
        bytes_per_s: From a GPU to the next.
        call_s: Of an all-reduce, beside its steps and its bytes.
        step_s: Of each of the 2 (tp - 1) steps of its ring, beside its bytes.
    """

    bytes_per_s: float
    call_s: float = 0.0
    step_s: float = 0.0

    def link(self, tp: int) -> cost.Link | None:
        """For the cost model, which knows a latency a step; None for one GPU."""
        if tp == 1:
            return None
        return cost.Link(self.bytes_per_s, latency_s=self.step_s + self.call_s / (2 * (tp - 1)))


@dataclass(frozen=True)
class JobTimes:
    """The times of one model's jobs; as `kvpool.policy.multiplexing.Timing`, and in parts.

    Attributes:
        model: The cost model of one rank, with all of a GPU.
        ring: Between tensor-parallel ranks; None counts their communication as free.
        launches: Of the host.
        bandwidth_share: The part of the units that saturates the bandwidth.
    """

    model: cost.CostModel
    ring: Ring | None = None
    launches: Launches = NO_LAUNCHES
    bandwidth_share: float = BANDWIDTH_SHARE
    _split: dict[int, tuple[cost.CostModel, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _steps: dict[tuple[int, int], tuple[Parts, Parts]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def prefill_s(self, share: float, batch: int, tokens: int, tp: int) -> float:
        """Seconds of the prefill of `batch` prompts of this length, alone."""
        return alone_s(self._equal(batch, tokens, 0, tp, self.launches.prefill_s), share, self.bandwidth_share)

    def decode_s(self, share: float, batch: int, tokens: int, tp: int) -> float:
        """Seconds of one token more for `batch` requests that have this many, alone."""
        return alone_s(self.decode_parts(batch, batch * tokens, tp), share, self.bandwidth_share)

    def decode_reads_s(self, batch: int, tokens: int, tp: int) -> float:
        """Seconds of such a step that are reads, with all of the bandwidth."""
        return self.decode_parts(batch, batch * tokens, tp).memory_s

    def prefill_parts(self, lengths: Sequence[int], tp: int) -> Parts:
        """Of one prefill of these prompts."""
        prompts = [(length, 0) for length in lengths]
        compute, memory, calls = (model.batch_s(prompts) for model in self._models(tp))
        return Parts(compute, memory, calls + self._shared_s, self.launches.prefill_s * self.model.model.layers)

    def decode_parts(self, batch: int, context: int, tp: int) -> Parts:
        """Of one step.

        Args:
            batch: Requests, 1 or more.
            context: Tokens that they have all together.
            tp: GPUs.
        """
        found = self._steps.get((batch, tp))
        if found is None:
            launches_s = self.launches.decode_s
            none = self._equal(batch, 1, 0, tp, launches_s)
            many = self._equal(batch, _FAR + 1, _FAR, tp, launches_s)
            slopes = Parts(*((far - near) / (batch * _FAR) for near, far in zip(none, many, strict=True)))
            found = self._steps[batch, tp] = none, slopes
        base, slope = found
        return Parts(
            base.compute_s + slope.compute_s * context,
            base.memory_s + slope.memory_s * context,
            base.calls_s + slope.calls_s * context,
            base.launches_s,
        )

    def _equal(self, batch: int, tokens: int, cached: int, tp: int, launches_s: float) -> Parts:
        compute, memory, calls = (model.equal_batch_s(batch, tokens, cached) for model in self._models(tp))
        return Parts(compute, memory, calls + self._shared_s, launches_s * self.model.model.layers)

    @cached_property
    def _shared_s(self) -> float:
        """Of the calls that all requests of a step share."""
        runs = [operator for operator in OPERATORS.values() if operator.name in EACH_PROMPT]
        linear = self.model.fits.linear
        return self.model.model.layers * sum(
            operator.per_layer * linear[operator.name][operator.features.index(ONE)]
            for operator in runs
            if operator.name in linear
        )

    def _models(self, tp: int) -> tuple[cost.CostModel, ...]:
        """Cost models of the arithmetic alone, of the reads alone, and of calls and communication."""
        if tp not in self._split:
            split = cost.Parallel(tp=tp)
            linked = cost.Parallel(tp=tp, tp_link=self.ring.link(tp) if self.ring else None)
            compute, memory, calls = _split(self.model.fits)
            shape, tokens = self.model.model, self.model.block_tokens
            self._split[tp] = (
                cost.CostModel(shape, compute, split, tokens),
                cost.CostModel(shape, memory, split, tokens),
                cost.CostModel(shape, calls, linked, tokens),
            )
        return self._split[tp]


def _split(fits: cost.Fits) -> tuple[cost.Fits, cost.Fits, cost.Fits]:
    """Fits that have only the arithmetic, only the reads, and only the calls of these."""
    kinds: tuple[dict[str, tuple[float, ...]], ...] = ({}, {}, {})
    for name, coefficients in fits.linear.items():
        operator = OPERATORS[name]
        for at, linear in enumerate(kinds):
            linear[name] = tuple(
                coefficient if _kind(operator, feature) == at else 0.0
                for feature, coefficient in zip(operator.features, coefficients, strict=False)
            )
    waves = fits.waves
    arithmetic = replace(waves, weight_bytes_per_s=_INFINITE, call_s=0.0)
    reads = replace(waves, flops_per_s=_INFINITE, call_s=0.0)
    calls = replace(waves, flops_per_s=_INFINITE, weight_bytes_per_s=_INFINITE)
    return tuple(map(cost.Fits, (arithmetic, reads, calls), kinds))  # type: ignore[return-value]


def _kind(operator: cost.Operator, feature: int) -> int:
    """0 for arithmetic, 1 for reads, 2 for calls: as `CostTiming` slows them down; 3 for calls that a step shares."""
    if feature == NEW_2:
        return 0
    if feature != ONE or operator.fixed_split:
        return 1
    return 3 if operator.name in EACH_PROMPT else 2


def alone_s(parts: Parts, share: float, bandwidth_share: float = BANDWIDTH_SHARE, slower: float = 1.0) -> float:
    """Seconds of a step with a share of the compute, whose reads are slowed down by a factor, at least 1."""
    reads_s = parts.memory_s * slower / min(1.0, share / bandwidth_share)
    return max(parts.launches_s, parts.compute_s / share + reads_s + parts.calls_s)


def slowdown(jobs: Sequence[tuple[Parts, float]], bandwidth_share: float = BANDWIDTH_SHARE) -> float:
    """The factor that slows the reads of all jobs down, so that together they read no more than the memory gives.

    Args:
        jobs: The parts and the share of each that runs.
        bandwidth_share: The part of the units that saturates the bandwidth.

    Returns:
        1 if the bandwidth suffices, otherwise the factor at which all of it is used.
    """

    def used(slower: float) -> float:
        """The part of the bandwidth that all use, on average over their steps."""
        return sum(parts.memory_s / alone_s(parts, share, bandwidth_share, slower) for parts, share in jobs)

    if len(jobs) < 2 or used(1.0) <= 1:
        return 1.0
    low, high = 1.0, float(len(jobs))  # there each uses at most an equal part
    over, under = used(low) - 1, used(high) - 1
    for _ in range(_STEPS_MAX):  # the chord's root; the end that stays is halved, so that both come near (Illinois)
        if under > -_NEAR:
            break
        middle = high - under * (high - low) / (under - over)
        found = used(middle) - 1
        if found > 0:
            low, over, under = middle, found, under / 2
        else:
            high, under, over = middle, found, over / 2
    return high
