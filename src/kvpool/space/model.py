"""A model in a space: its pool, and its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpool import _core
from kvpool.config import Settings
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.pool import Pool
from kvpool.space.rules import Rules
from kvpool.space.units import padding, units_of
from kvpool.types import KVLayout, RawLayout

__all__ = ["Model", "ModelPool", "check_name"]


class ModelPool(Pool):
    """A pool whose blocks are made of the units of a space."""

    def __init__(self, core: _core.Space, layout: KVLayout | RawLayout, settings: Settings, unit: int) -> None:
        """Space.load makes it."""
        self._begin(layout, settings, space=core)
        self._block_stride = units_of(layout, unit) * unit


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
        return units_of(self.layout, self.unit)

    @property
    def waste(self) -> float:
        """The part of a block's units that its content leaves empty."""
        return padding(self.layout, self.unit)


def check_name(name: object) -> str:
    """The name of a model. Raises ArgumentTypeError if it is no str, ArgumentError if it is empty or too long."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str, not {type(name).__name__}")
    if not name or len(name) > 255:
        raise ArgumentError("a model's name has from 1 to 255 characters")
    return name
