"""What a space reports: of each model, and of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.alloc.stats import PoolStats

__all__ = ["ModelQuota", "SpaceStats", "SpaceTier", "TierQuota", "tier_quota"]


@dataclass(frozen=True)
class TierQuota:
    """What a model may have and has of one medium, in bytes.

    Attributes:
        reserve: It can always have so much, in whole blocks.
        limit: It never has more, its prompt cache included; in whole blocks.
        quota: The target that follows what models need: what is cached beyond it is evicted first.
        active: Cannot be evicted: held by requests, pinned, or a peer's.
        cached: Prompt cache that can be evicted.
    """

    reserve: int
    limit: int
    quota: int
    active: int
    cached: int


def tier_quota(numbers: tuple[int, int, int, int, int], capacity: int, unit: int) -> TierQuota:
    """What the core says in units."""
    reserve, limit, quota, active, cached = numbers
    return TierQuota(reserve * unit, min(limit, capacity) * unit, quota * unit, active * unit, cached * unit)


@dataclass(frozen=True)
class ModelQuota:
    """The quotas of a model.

    Attributes:
        hbm: In the device tier.
        dram: In the host tier.
        weight: Its part of what is scarce, relative to others with the same demand.
        block_bytes: Bytes of the units of a block.
        waste: The part of them that the block's content leaves empty.
        kept: Whether the model is unloaded, and only its cache in DRAM is kept.
    """

    hbm: TierQuota
    dram: TierQuota
    weight: float
    block_bytes: int
    waste: float
    kept: bool


@dataclass(frozen=True)
class SpaceTier:
    """One medium of a space, in bytes.

    `free + active + historical + reserved + lent + quarantined + retired == capacity`, always.

    Attributes:
        capacity: All units.
        free: Units that nobody has.
        active: Of blocks that callers own.
        historical: Of cached prompts, pinned or not.
        reserved: Of blocks reserved for a transfer or a swap in progress.
        lent: Of blocks lent to another instance.
        quarantined: Of blocks that become free once a lost peer is proved to write no more.
        retired: Of blocks whose generations are used up, or that a pool which was closed instead of unloaded has left.
        largest_run: The longest run of free units: the largest block that finds a place in one piece.
    """

    capacity: int
    free: int
    active: int
    historical: int
    reserved: int
    lent: int
    quarantined: int
    retired: int
    largest_run: int


@dataclass(frozen=True)
class SpaceStats:
    """The state of a space.

    Attributes:
        unit_bytes: Bytes of a unit.
        activations: Bytes of HBM that the space leaves to the engines.
        hbm: The device tier.
        dram: The host tier.
        metadata_bytes: Memory of the allocator, for the units and for the blocks of all models: those of `models`, and
            what they share.
        models: The statistics of each model's pool, by name. Their counts are blocks: `free` are those that have a
            place now, before anything is evicted.
    """

    unit_bytes: int
    activations: int
    hbm: SpaceTier
    dram: SpaceTier
    metadata_bytes: int
    models: Mapping[str, PoolStats]
