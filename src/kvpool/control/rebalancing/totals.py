"""What became of plans, counted for metrics."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RebalancingTotals", "Tally"]


@dataclass(frozen=True)
class RebalancingTotals:
    """Counts of one instance.

    Attributes:
        plans_made: Plans that it has made, as the planner.
        plans_accepted: Plans that it has accepted.
        moves: Moves of plans, by what became of them here, at their source: "ok", "void" if the request had ended or
            was on its way, or its destination was gone, "superseded" if the next plan came first, "Fenced" if this
            instance had lost its lease by then, or the name of an error.
        placed: New requests that it has sent to their place.
        takeovers: How often it has become the planner.
    """

    plans_made: int
    plans_accepted: int
    moves: Mapping[str, int]
    placed: int
    takeovers: int


class Tally:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._moves: Counter[str] = Counter()

    def count(self, what: str, number: int = 1) -> None:
        """`what` is "plans_made", "plans_accepted", "placed" or "takeovers"."""
        with self._lock:
            self._counts[what] += number

    def moved(self, result: str, number: int = 1) -> None:
        """A move of a plan has ended so."""
        if number:
            with self._lock:
                self._moves[result] += number

    def totals(self) -> RebalancingTotals:
        """The counts so far."""
        with self._lock:
            one = self._counts
            return RebalancingTotals(
                one["plans_made"], one["plans_accepted"], dict(self._moves), one["placed"], one["takeovers"]
            )
