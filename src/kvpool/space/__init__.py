"""Several models in one memory: `Space`, and what it reports."""

from __future__ import annotations

from kvpool.space.records import ModelQuota, SpaceStats, SpaceTier, TierQuota
from kvpool.space.space import Space

__all__ = ["ModelQuota", "Space", "SpaceStats", "SpaceTier", "TierQuota"]
