"""The settings of the load cap, of newcomers, and of how long a request waits while another instance is idle."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import ArgumentError

__all__ = ["Balance"]


@dataclass(frozen=True)
class Balance:
    """When an instance has enough.

    Attributes:
        cap: Times the mean load; at least 1. Infinite switches the cap off.
        slack: Work above that which is always granted, in prompts of the size that is to be placed: without it a fleet
            without work could place nothing.
        idle: Utilisation below which an instance that prefills may always get more: keeping prompts together costs
            nobody anything there.
        half_life_s: After which work that is done counts half.
        warmup_s: How long after joining an instance has less than its share.
        warmup_floor: The share that it begins with.
        patience: How long a request may wait for a busy instance while another one is idle: so many times what the
            idle one takes longer to compute the prompt, because it holds less of it. At 1, no request waits longer
            than it takes to compute the prefix again. Infinite switches the rule off, as the papers' policies have it.
    """

    cap: float = 2.0
    slack: float = 1.0
    idle: float = 0.2
    half_life_s: float = 30.0
    warmup_s: float = 60.0
    warmup_floor: float = 0.1
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not (self.cap >= 1 and self.slack >= 0 and self.half_life_s > 0 and self.warmup_s >= 0):
            raise ArgumentError(f"cap at least 1, slack and warmup_s at least 0, half_life_s above 0: {self}")
        if not 0 < self.warmup_floor <= 1 or not 0 <= self.idle <= 1:
            raise ArgumentError(f"warmup_floor above 0 and idle at least 0, both at most 1: {self}")
        if not self.patience >= 0:
            raise ArgumentError(f"patience is {self.patience}; it must be at least 0")
