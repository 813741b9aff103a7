"""What models may have, read from sizes in bytes: rules in units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from kvpool.errors import ArgumentError
from kvpool.policy.quotas import QuotaRule
from kvpool.space.units import bytes_from

__all__ = ["SAME", "TIERS", "Rules", "Sizes", "Tier", "changed_rules", "rules_of"]

Tier = Literal["hbm", "dram"]
TIERS: Final[tuple[Tier, Tier]] = ("hbm", "dram")

Rules = dict[Tier, QuotaRule]  # in units
Sizes = Mapping[Tier, tuple[object, object]]  # a reserve and a limit, as callers give them

SAME: Final[Any] = object()  # an argument that was not given


def rules_of(sizes: Sizes, weight: float, block_units: int, unit: int) -> Rules:
    """The rules of a model: reserves in whole blocks, rounded up; limits rounded down.

    Raises:
        ArgumentError: A reserve is above its limit, a limit below a block, the weight 0, negative or not finite.
        ArgumentTypeError: A value has the wrong type.
    """
    return {tier: _rule(*sizes[tier], weight, block_units, unit, tier.upper()) for tier in TIERS}


def changed_rules(old: Rules, sizes: Sizes, weight: float, block_units: int, unit: int) -> Rules:
    """As rules_of(); what is SAME stays."""
    given: Sizes = {tier: _given(old[tier], *sizes[tier], unit) for tier in TIERS}
    return rules_of(given, old["hbm"].weight if weight is SAME else weight, block_units, unit)


def _rule(reserve: object, limit: object, weight: float, block_units: int, unit: int, where: str) -> QuotaRule:
    block_bytes = block_units * unit
    kept = -(-bytes_from(reserve, f"the reserve in {where}") // block_bytes)
    if limit is None:
        return QuotaRule(kept * block_units, None, weight)
    most = bytes_from(limit, f"the limit in {where}")
    blocks = most // block_bytes
    if blocks < 1:
        raise ArgumentError(f"the limit in {where} is {most} bytes, and a block has {block_bytes}")
    return QuotaRule(kept * block_units, blocks * block_units, weight)


def _given(old: QuotaRule, reserve: object, limit: object, unit: int) -> tuple[object, object]:
    before = None if old.limit is None else old.limit * unit
    return old.reserve * unit if reserve is SAME else reserve, before if limit is SAME else limit
