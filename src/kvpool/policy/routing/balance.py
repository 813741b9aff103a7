"""The settings of the load cap, of newcomers, and of how long a request waits while another instance is idle."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import ArgumentError

__all__ = ["Balance"]


@dataclass(frozen=True)
class Balance:
    """When an instance has enough work.

    Attributes:
        cap: The largest load, as a multiple of the mean; at least 1. Infinite switches the cap off.
        slack: Work above the cap that is always allowed, in prompts of the size to place: without it a fleet without
            work could place nothing.
        idle: Utilisation below which an instance that prefills may always get more: keeping prompts together slows
            nobody down there.
        half_life_s: The time after which finished work counts half.
        warmup_s: How long an instance that has joined has less than its share. When it has a full one, or is resumed
            after a drain, it counts as having worked lately as the others have, or the cap would forbid them all.
        warmup_floor: The share that it begins with.
        patience: How long a request may wait for a busy instance while another one is idle, as a multiple of the time
            that the idle one takes longer to compute the prompt, because it holds less of it. At 1, no request waits
            longer than computing the prefix again takes. Infinite switches the rule off, as in the papers' policies.
            None: as the policy says, which is 1 for all but `KeepHits`.
    """

    cap: float = 1.2
    slack: float = 1.0
    idle: float = 0.02
    half_life_s: float = 120.0
    warmup_s: float = 60.0
    warmup_floor: float = 0.1
    patience: float | None = None

    def __post_init__(self) -> None:
        if not (self.cap >= 1 and self.slack >= 0 and self.half_life_s > 0 and self.warmup_s >= 0):
            raise ArgumentError(f"cap at least 1, slack and warmup_s at least 0, half_life_s above 0: {self}")
        if not 0 < self.warmup_floor <= 1 or not 0 <= self.idle <= 1:
            raise ArgumentError(f"warmup_floor above 0 and idle at least 0, both at most 1: {self}")
        if self.patience is not None and not self.patience >= 0:
            raise ArgumentError(f"patience is {self.patience}; it must be at least 0")
