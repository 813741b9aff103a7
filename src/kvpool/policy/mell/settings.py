"""What the provider of a service sets for the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["MOVES_AN_OPERATION", "Settings", "Weights", "one_switch"]

# Theorem 3 of the paper: no operation moves more items.
MOVES_AN_OPERATION = 10


def one_switch(first: int, second: int) -> float:
    """A distance for GPUs of which nobody has said where they are: equal for all."""
    return 0.0 if first == second else 1.0


@dataclass(frozen=True)
class Weights:
    """How much each factor counts where several GPUs would do; the lowest sum is taken (priorities, §VI-C).

    Attributes:
        free: Times what stays free there, as a part of C. Positive: the tightest fit first; negative: the emptiest
            first.
        requests: Times the number of requests there.
        distance: Times the distance from the GPU that the request leaves.
    """

    free: float = 1.0
    requests: float = 0.0
    distance: float = 0.0


@dataclass(frozen=True)
class Settings:
    """Of a `Mell` scheduler.

    Attributes:
        slack: Tokens that T and small requests leave free where they are placed, and that growth clears at once when it
            must clear something: fewer moves for more GPUs. At most C/4. The five properties hold whatever it is.
        consolidate: Use what an operation has left of its ten moves to empty a GPU into room elsewhere.
        reserve: Consolidate only where so many tokens stay free elsewhere for each GPU that is left.
        never_more: Let a batch be what it would be one by one where that takes fewer moves. It costs the time of both.
        weights: Of the priorities.
        distance: How far two GPUs are from each other; any unit, `Weights.distance` scales it.
        candidates: How many GPUs the priorities choose among: those with the tightest fit.
    """

    slack: int = 0
    consolidate: bool = True
    reserve: int = 0
    never_more: bool = True
    weights: Weights = field(default_factory=Weights)
    distance: Callable[[int, int], float] = one_switch
    candidates: int = 8
