"""What became of the migrations of a pool, counted for metrics."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvpool.control.migration.handle import Migrated

__all__ = ["MigrationTotals", "Tally"]

_BOUNDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, float("inf"))


@dataclass(frozen=True)
class MigrationTotals:
    """The migrations that have ended.

    Attributes:
        left: Requests that left or were to leave, by way and result: "ok", or the name of the error.
        arrived: Requests that came or were to come, by way and result: "ok", "failed" or "revoked".
        bytes: Of the blocks that were fetched for requests that have left.
        stop_seconds: The time for which those that have left were stopped, in all.
        stops: A histogram of these times: pairs of an upper bound in seconds, ascending, and a number.
    """

    left: Mapping[tuple[str, str], int]
    arrived: Mapping[tuple[str, str], int]
    bytes: int
    stop_seconds: float
    stops: tuple[tuple[float, int], ...]


class Tally:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: Counter[tuple[str, str]] = Counter()
        self._arrived: Counter[tuple[str, str]] = Counter()
        self._bytes = 0
        self._stop_s = 0.0
        self._stops = [0] * len(_BOUNDS)

    def left(self, way: str, outcome: Migrated | Exception) -> None:
        """A request has left, or stays."""
        with self._lock:
            if isinstance(outcome, Migrated):
                self._left[outcome.way, "ok"] += 1
                self._bytes += outcome.bytes
                self._stop_s += outcome.stop_s
                self._stops[bisect.bisect_left(_BOUNDS, outcome.stop_s)] += 1
            else:
                self._left[way, type(outcome).__name__] += 1

    def arrived(self, way: str, result: str) -> None:
        """A request has arrived, or has not."""
        with self._lock:
            self._arrived[way, result] += 1

    def totals(self) -> MigrationTotals:
        """The counts so far."""
        with self._lock:
            return MigrationTotals(
                dict(self._left),
                dict(self._arrived),
                self._bytes,
                self._stop_s,
                tuple(zip(_BOUNDS, self._stops, strict=True)),
            )
