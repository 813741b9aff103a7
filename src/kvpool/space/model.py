"""A model in a space: its pool, and its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvpool import _core
from kvpool.config import Settings
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.policy.multiplexing import QuotaRule
from kvpool.pool import Pool
from kvpool.space.units import bytes_from, padding
from kvpool.types import KVLayout, RawLayout

__all__ = ["TIERS", "Model", "ModelPool", "Rules", "Tier", "check_name", "rule_of"]

Tier = Literal["hbm", "dram"]
TIERS: Final[tuple[Tier, Tier]] = ("hbm", "dram")

Rules = dict[Tier, QuotaRule]  # in units


class ModelPool(Pool):
    """A pool whose blocks are made of the units of a space."""

    def __init__(self, core: _core.Space, layout: KVLayout | RawLayout, settings: Settings, unit: int) -> None:
        """Space.load makes it."""
        self._begin(layout, settings, space=core)
        self._block_stride = -(-layout.block_bytes // unit) * unit


@dataclass
class Model:
    """A model that was loaded.

    Attributes:
        pool: Its pool, also while only its cache is kept.
        number: Its place in the core.
        layout: Of its blocks.
        unit: Bytes of a unit.
        rules: Its own, also while it is kept.
        state: "kept": unloaded, with its cache in DRAM. "leaving": it is being drained.
    """

    pool: ModelPool
    number: int
    layout: KVLayout | RawLayout
    unit: int
    rules: Rules
    state: Literal["loaded", "leaving", "kept"] = "loaded"

    @property
    def has_quotas(self) -> bool:
        """Whether it may have anything: not when only its cache is kept, nor when its pool was closed."""
        return self.state != "kept" and not self.pool.closed

    @property
    def block_units(self) -> int:
        """Units of a block."""
        return -(-self.layout.block_bytes // self.unit)

    @property
    def waste(self) -> float:
        """The part of a block's units that its content leaves empty."""
        return padding(self.layout, self.unit)


def rule_of(reserve: object, limit: object, weight: float, block_bytes: int, block_units: int, where: str) -> QuotaRule:
    """A rule in units, from sizes in bytes: the reserve in whole blocks, rounded up; the limit rounded down.

    Raises:
        ArgumentError: The reserve is above the limit, the limit below a block, the weight 0, negative or not finite.
        ArgumentTypeError: A value has the wrong type.
    """
    kept = -(-bytes_from(reserve, f"the reserve in {where}") // block_bytes)
    if limit is None:
        return QuotaRule(kept * block_units, None, weight)
    most = bytes_from(limit, f"the limit in {where}")
    blocks = most // block_bytes
    if blocks < 1:
        raise ArgumentError(f"the limit in {where} is {most} bytes, and a block has {block_bytes}")
    return QuotaRule(kept * block_units, blocks * block_units, weight)


def check_name(name: object) -> str:
    """The name of a model. Raises ArgumentTypeError if it is no str, ArgumentError if it is empty or too long."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str, not {type(name).__name__}")
    if not name or len(name) > 255:
        raise ArgumentError("a model's name has from 1 to 255 characters")
    return name
