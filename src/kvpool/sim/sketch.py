"""Quantiles of numbers too many to keep: counts in buckets whose bounds grow geometrically."""

from __future__ import annotations

from math import exp, log
from typing import Any, Final

from kvpool.errors import ArgumentError

__all__ = ["Sketch"]

_LEAST: Final = 1e-9  # shorter times count as zero


class Sketch:
    """Counts of positive numbers by their logarithm. Not thread-safe.

    A quantile is wrong by `error` of its value at most (Masson, Rim and Lee, DDSketch, VLDB 2019, §2). Memory grows
    with the logarithm of largest over smallest: a few thousand counts between a microsecond and a day.

    Args:
        error: Relative, above 0 and below 1.
    """

    __slots__ = ("_buckets", "_log_growth", "_scale", "count", "error", "largest", "total", "zeros")

    def __init__(self, error: float = 0.005) -> None:
        if not 0 < error < 1:
            raise ArgumentError(f"error is {error}; it must be above 0 and below 1")
        self.error = error
        self._log_growth = log((1 + error) / (1 - error))
        self._scale = 1 / self._log_growth
        self._buckets: dict[int, int] = {}
        self.zeros = 0
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Counts a number; below a billionth it counts as zero."""
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        if value <= _LEAST:
            self.zeros += 1
            return
        bucket = int(log(value / _LEAST) * self._scale)
        buckets = self._buckets
        buckets[bucket] = buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        """Exact; 0 of nothing."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """The number below which a share `q` of them lies; 0 of nothing. Raises ArgumentError unless 0 <= q <= 1."""
        if not 0 <= q <= 1:
            raise ArgumentError(f"a quantile of {q}; it is from 0 to 1")
        rank = q * (self.count - 1)
        seen = self.zeros
        if rank < seen or not self.count:
            return 0.0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen > rank:
                return min(self._middle(bucket), self.largest)
        return self.largest

    def share(self, value: float) -> float:
        """The share of the numbers that are at most `value`, as exact as `quantile`; 1 of nothing."""
        if not self.count:
            return 1.0
        within = self.zeros if value >= 0 else 0
        within += sum(
            count for bucket, count in self._buckets.items() if min(self._middle(bucket), self.largest) <= value
        )
        return within / self.count

    def cumulative(self) -> list[tuple[float, float]]:
        """(value, share of the numbers that are at most that), rising: the distribution, for a plot."""
        points, seen = [], self.zeros
        if self.zeros:
            points.append((0.0, seen / self.count))
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            points.append((_LEAST * exp((bucket + 1) * self._log_growth), seen / self.count))
        return points

    def as_json(self) -> dict[str, Any]:
        """Mean, quantiles and the largest, in the unit of what was added."""
        quantiles = {f"p{100 * q:g}": self.quantile(q) for q in (0.5, 0.9, 0.95, 0.99, 0.999)}
        return {"count": self.count, "mean": self.mean, **quantiles, "max": self.largest}

    def _middle(self, bucket: int) -> float:
        """The number with the same relative distance from both bounds of a bucket."""
        low = _LEAST * exp(bucket * self._log_growth)
        return low * (1 + self.error)
