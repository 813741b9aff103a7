"""Least squares with no coefficient below zero, and the quality of a fit.

A negative coefficient would say that more work takes less time, and a prediction outside the measured range could come
out below zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError

__all__ = ["ErrorReport", "Floats", "fit_nonnegative", "relative_residual", "solve"]

Floats = npt.NDArray[np.float64]

_FEATURES_MAX = 8  # the search below looks at every set of features


def solve(features: Floats, seconds: Floats) -> Floats:
    """Coefficients of the least relative squares: each row counts by its error relative to its time.

    Without that, the longest prompts would decide alone. REQUIRES: seconds above 0. Raises ArgumentError when there are
    fewer rows than features.
    """
    rows, columns = features.shape
    if rows < columns:
        raise ArgumentError(f"{rows} measurements do not determine {columns} coefficients")
    weighted = features / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    solution: Floats = np.linalg.lstsq(weighted / scale, np.ones(rows), rcond=None)[0] / scale
    return solution


def fit_nonnegative(features: Floats, seconds: Floats) -> Floats:
    """As solve, among coefficients that are all at least 0: the best of all sets of features.

    Exact: at the optimum the coefficients above 0 solve the least squares of their features alone. There are few
    features, so looking at every set is cheap.
    """
    columns = features.shape[1]
    if columns > _FEATURES_MAX:
        raise ArgumentError(f"{columns} features; at most {_FEATURES_MAX}")
    best, best_residual = np.zeros(columns), float("inf")
    solve(features, seconds)  # for its check
    for size in range(columns, 0, -1):
        for chosen in map(list, combinations(range(columns), size)):
            partial = solve(features[:, chosen], seconds)
            if (partial < 0).any():
                continue
            residual = relative_residual(features[:, chosen] @ partial, seconds)
            if residual < best_residual:
                best, best_residual = np.zeros(columns), residual
                best[chosen] = partial
    return best


def relative_residual(predicted: Floats, measured: Floats) -> float:
    """Sum of the squares of the relative errors."""
    return float((((predicted - measured) / measured) ** 2).sum())


@dataclass(frozen=True)
class ErrorReport:
    """The errors of predictions, relative to the measurements.

    Attributes:
        mean: Mean of the absolute relative errors.
        median: Their median.
        p90: 90 % are at most this.
        worst: The largest.
        bias: Mean of the signed ones: above 0 where predictions are too long.
        n: How many.
    """

    mean: float
    median: float
    p90: float
    worst: float
    bias: float
    n: int

    @classmethod
    def of(cls, predicted: Iterable[float], measured: Iterable[float]) -> ErrorReport:
        """Compares pairs of times. Raises ArgumentError for none, or when they differ in number."""
        guesses, times = np.fromiter(predicted, float), np.fromiter(measured, float)
        if len(guesses) != len(times) or len(times) == 0:
            raise ArgumentError(f"{len(guesses)} predictions for {len(times)} measurements")
        signed = (guesses - times) / times
        errors = np.abs(signed)
        return cls(
            float(errors.mean()),
            float(np.median(errors)),
            float(np.quantile(errors, 0.9)),
            float(errors.max()),
            float(signed.mean()),
            len(times),
        )

    def __str__(self) -> str:
        return f"mean {self.mean:.1%}, p90 {self.p90:.1%}, worst {self.worst:.1%}, bias {self.bias:+.1%} of {self.n}"
