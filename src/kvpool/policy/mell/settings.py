"""The settings that the provider of a service gives the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

__all__ = ["MOVES_AN_OPERATION", "Settings", "Weights", "one_switch"]

# Theorem 3 of the paper: no operation moves more items.
MOVES_AN_OPERATION = 10

_SLACK_PART: Final = 40


def one_switch(first: int, second: int) -> float:
    """The distance if the places of GPUs are unknown: equal for all."""
    return 0.0 if first == second else 1.0


@dataclass(frozen=True)
class Weights:
    """The weight of each factor in choosing among several GPUs; the lowest sum wins (priorities, §VI-C).

    Attributes:
        free: Of what stays free there, as a part of C. Positive: the tightest fit first; negative: the emptiest first.
        requests: Of the number of requests there.
        distance: Of the distance from the GPU that the request leaves.
    """

    free: float = 1.0
    requests: float = 0.0
    distance: float = 0.0


@dataclass(frozen=True)
class Settings:
    """The settings of a `Mell` scheduler.

    Attributes:
        slack: Tokens that T and small requests leave free where they are placed, and that growth clears at once when it
            must clear something: fewer moves for more GPUs. At most C/4; None: C/40, which halves the moves of 0 for
            0.7 % more GPUs. The five properties hold for every value.
        consolidate: Whether an operation uses the rest of its ten moves to empty a GPU into room elsewhere.
        reserve: Consolidate only if this many tokens per remaining GPU stay free elsewhere.
        never_more: Do a batch's operations one by one if that takes fewer moves. It costs the time of both.
        weights: Of the priorities.
        distance: How far two GPUs are from each other; any unit, `Weights.distance` scales it.
        candidates: How many GPUs the priorities choose among: those with the tightest fit.
    """

    slack: int | None = None
    consolidate: bool = True
    reserve: int = 0
    never_more: bool = True
    weights: Weights = field(default_factory=Weights)
    distance: Callable[[int, int], float] = one_switch
    candidates: int = 8

    def slack_of(self, capacity: int) -> int:
        """The slack on GPUs of this capacity."""
        return capacity // _SLACK_PART if self.slack is None else self.slack
