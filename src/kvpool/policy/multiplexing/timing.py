"""How long a job takes with a part of the compute: t(share, batch, length), from a cost model or from measurements.

Work that computes goes at the rate of its share. Work that reads memory does not: a part of a GPU's units already
saturates its bandwidth (MuxServe's Fig 3: decode hardly slows down while its share shrinks from 100 % to 40 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy.cost import OPERATORS, CostModel, Fits, Link, Parallel
from kvpool.policy.cost.fit import Floats, fit_nonnegative, relative_residual
from kvpool.policy.cost.operators import NEW_2, ONE
from kvpool.policy.quotas.arguments import number_above_0, share_of, whole

__all__ = ["BANDWIDTH_SHARE", "CostTiming", "FittedTiming", "StepFit", "StepSample", "Timing"]

BANDWIDTH_SHARE: Final = 0.4  # of the units saturates the bandwidth, after Fig 3
_BANDWIDTH_SHARES: Final = tuple(step / 20 for step in range(1, 21))


class Timing(Protocol):
    """Seconds of one job of a model on `tp` GPUs, of which it has a `share`, above 0 and at most 1."""

    def prefill_s(self, share: float, batch: int, tokens: int, tp: int) -> float:
        """Of the prefill of `batch` prompts of this length."""

    def decode_s(self, share: float, batch: int, tokens: int, tp: int) -> float:
        """Of one token more for `batch` requests that have this many."""

    def decode_reads_s(self, batch: int, tokens: int, tp: int) -> float:
        """Of these, what reads with all of the bandwidth take: jobs beside each other share one bandwidth."""


@dataclass(frozen=True)
class CostTiming:
    """From the operator-level cost model (`kvpool.policy.cost`), whose profile was measured with all of a GPU.

    Compute-bound operators have fewer units, so more waves; what reads weights or KV has the bandwidth of the share;
    the cost of calls stays.

    Attributes:
        model: Of one rank.
        link: Between tensor-parallel ranks; None counts their communication as free.
        bandwidth_share: The part of the units that saturates the bandwidth.
    """

    model: CostModel
    link: Link | None = None
    bandwidth_share: float = BANDWIDTH_SHARE
    _models: dict[tuple[float, int, float], CostModel] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        share_of(self.bandwidth_share, "bandwidth_share")

    def prefill_s(self, share: float, batch: int, tokens: int, tp: int) -> float:
        """As `Timing`. Raises ArgumentError if the model cannot be split in this way, or a number is out of range."""
        return self._model(share, tp).equal_batch_s(batch, tokens)

    def decode_s(self, share: float, batch: int, tokens: int, tp: int) -> float:
        """As `Timing`. Raises ArgumentError if the model cannot be split in this way, or a number is out of range."""
        return self._model(share, tp).equal_batch_s(batch, tokens + 1, tokens)

    def decode_reads_s(self, batch: int, tokens: int, tp: int) -> float:
        """As `Timing`. Raises ArgumentError if the model cannot be split in this way, or a number is out of range."""
        slower = self._model(1.0, tp, reads=0.5).equal_batch_s(batch, tokens + 1, tokens)
        return slower - self.decode_s(1.0, batch, tokens, tp)

    def _model(self, share: float, tp: int, reads: float = 1.0) -> CostModel:
        """With a share of the units, and of its bandwidth again a part."""
        found = self._models.get((share, tp, reads))
        if found is None:
            bandwidth = reads * min(1.0, share_of(share, "share") / self.bandwidth_share)
            fits = _with_share(self.model.fits, share, bandwidth)
            parallel = Parallel(tp=tp, tp_link=self.link if tp > 1 else None)
            found = CostModel(self.model.model, fits, parallel, self.model.block_tokens)
            self._models[share, tp, reads] = found
        return found


def _with_share(fits: Fits, share: float, bandwidth: float) -> Fits:
    """The fits of a machine that has a part of the units, and a part of the bandwidth."""
    units = max(1, round(fits.waves.units * share))
    waves = replace(
        fits.waves,
        units=units,
        flops_per_s=fits.waves.flops_per_s * units / fits.waves.units,
        weight_bytes_per_s=fits.waves.weight_bytes_per_s * bandwidth,
    )
    linear = {}
    for name, coefficients in fits.linear.items():
        operator = OPERATORS[name]
        slower = []
        for feature, coefficient in zip(operator.features, coefficients, strict=False):
            if feature == NEW_2:
                slower.append(coefficient / share)  # attention of a prompt to itself computes
            elif feature == ONE and not operator.fixed_split:
                slower.append(coefficient)  # the cost of a call
            else:
                slower.append(coefficient / bandwidth)
        linear[name] = tuple(slower)
    return Fits(waves, linear)


class StepSample(NamedTuple):
    """One measured job: its share of the compute, its requests, the tokens of each, and its time."""

    share: float
    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class StepFit:
    """t(share, batch, length) of one phase on one parallelism, by relative least squares with no coefficient below 0.

    With c = 1 / share and w = 1 / min(1, share / bandwidth_share), b requests of l tokens:
    t = k0 + c (k1 b + k2 b l + k3 b l^2) + w (k4 + k5 b + k6 b l).

    Attributes:
        coefficients: k0 to k6, seconds.
        bandwidth_share: The part of the units that saturates the bandwidth: the one of twenty that fits best.
    """

    coefficients: tuple[float, ...]
    bandwidth_share: float

    def time_s(self, share: float, batch: int, tokens: int) -> float:
        """Seconds."""
        compute, read = 1 / share, 1 / min(1.0, share / self.bandwidth_share)
        k0, k1, k2, k3, k4, k5, k6 = self.coefficients
        all_tokens = batch * tokens
        computed = k1 * batch + k2 * all_tokens + k3 * all_tokens * tokens
        return k0 + compute * computed + read * (k4 + k5 * batch + k6 * all_tokens)

    def reads_s(self, batch: int, tokens: int) -> float:
        """Seconds of it that are reads, with all of the bandwidth."""
        *_, k4, k5, k6 = self.coefficients
        return k4 + k5 * batch + k6 * batch * tokens

    @classmethod
    def fit(cls, samples: Iterable[StepSample]) -> StepFit:
        """From measurements at several shares, batches and lengths.

        Raises:
            ArgumentError: There are fewer than seven, or a value is out of range.
            ArgumentTypeError: A value is no number.
        """
        measured = list(samples)
        for sample in measured:
            share_of(sample.share, "the share of a sample")
            whole(sample.batch, "the batch of a sample", 1)
            whole(sample.tokens, "the tokens of a sample", 1)
            number_above_0(sample.seconds, "the seconds of a sample")
        if len(measured) < 7:
            raise ArgumentError(f"{len(measured)} measurements do not determine 7 coefficients")
        seconds = np.array([sample.seconds for sample in measured], dtype=np.float64)
        best, best_residual = cls((0.0,) * 7, 1.0), float("inf")
        for bandwidth_share in _BANDWIDTH_SHARES:
            features = _features(measured, bandwidth_share)
            coefficients = fit_nonnegative(features, seconds)
            residual = relative_residual(features @ coefficients, seconds)
            if residual < best_residual:
                best, best_residual = cls(tuple(coefficients.tolist()), bandwidth_share), residual
        return best


def _features(samples: Iterable[StepSample], bandwidth_share: float) -> Floats:
    rows = []
    for share, batch, tokens, _ in samples:
        compute, read = 1 / share, 1 / min(1.0, share / bandwidth_share)
        of_batch = (compute * batch, compute * batch * tokens, compute * batch * tokens**2)
        rows.append((1.0, *of_batch, read, read * batch, read * batch * tokens))
    return np.array(rows, dtype=np.float64)


@dataclass(frozen=True)
class FittedTiming:
    """From measured jobs.

    Attributes:
        prefill: A fit for each number of tensor-parallel GPUs that was measured.
        decode: Likewise.
    """

    prefill: Mapping[int, StepFit]
    decode: Mapping[int, StepFit]

    def prefill_s(self, share: float, batch: int, tokens: int, tp: int) -> float:
        """As `Timing`. Raises ArgumentError for a parallelism that was not measured."""
        return _measured(self.prefill, tp).time_s(share, batch, tokens)

    def decode_s(self, share: float, batch: int, tokens: int, tp: int) -> float:
        """As `Timing`. Raises ArgumentError for a parallelism that was not measured."""
        return _measured(self.decode, tp).time_s(share, batch, tokens)

    def decode_reads_s(self, batch: int, tokens: int, tp: int) -> float:
        """As `Timing`. Raises ArgumentError for a parallelism that was not measured."""
        return _measured(self.decode, tp).reads_s(batch, tokens)


def _measured(fits: Mapping[int, StepFit], tp: int) -> StepFit:
    if tp not in fits:
        raise ArgumentError(f"tp {tp} was not measured; measured were {', '.join(map(str, sorted(fits))) or 'none'}")
    return fits[tp]
