"""A model in a space: its pool, and its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvpool import _core
from kvpool.alloc.kv_view import kv_view
from kvpool.config import Settings
from kvpool.errors import ArgumentError, ArgumentTypeError, StateError, Unsupported
from kvpool.pool import Pool
from kvpool.space.rules import Rules
from kvpool.space.units import Pieces, padding, pieces_of, units_of
from kvpool.types import DRAM, HBM, AddressVector, KVLayout, OneMedium, RawLayout
from kvpool.types.memories import one_medium

__all__ = ["Model", "ModelPool", "check_name"]


class ModelPool(Pool):
    """A pool whose blocks are made of the units of a space.

    With ``pieces="layer"`` a block may lie in as many pieces as it has layers. Then `tensor` raises Unsupported, and so
    do attention, `Lending`, keyed caches, and routes to peers other than "loopback" and "sock": what reads such blocks
    takes `pages` and `block_table`.
    """

    def __init__(
        self, core: _core.Space, layout: KVLayout | RawLayout, settings: Settings, unit: int, pieces: Pieces
    ) -> None:
        """Space.load makes it. `unit`: its bytes; `pieces`: of Space.load, and the layout allows them."""
        cut = pieces_of(layout, unit, pieces)
        self._begin(layout, settings, space=core, pieces=cut)
        self._block_stride = unit  # a block's number is its first unit
        self._layered = pieces == "layer"  # also with one layer, and so one piece
        self._units = {int(medium): core._counts(int(medium))["capacity"] for medium in (HBM, DRAM)}
        self._block_units = units_of(layout, unit)

    def _rows(self, medium: int) -> int:
        rows: int = self._units[int(medium)] - self._block_units + 1
        return max(0, rows)

    def tensor(self, medium: OneMedium = HBM) -> _core.KVTensor:
        """As Pool.tensor, with a row for each unit of the space: a block's number is its first unit.

        Rows overlap: use those of the pool's own blocks alone.

        Raises:
            Unsupported: Blocks may lie in pieces: see `pages`.
            ArgumentError, ArgumentTypeError, ClosedError: As everywhere.
        """
        if self._pieces > 1:
            raise Unsupported("blocks of this pool may lie in several pieces, which no such view can show: see pages()")
        return super().tensor(medium)

    def pages(self, medium: OneMedium = HBM) -> _core.KVTensor:
        """One layer's keys and values at every unit, as a zero-copy view: for a kernel that reads pages by a table.

        Args:
            medium: kvpool.HBM or kvpool.DRAM.

        Returns:
            A KVTensor of shape [unit, k/v, head, token, dim], tokens before heads when the layout's `dims` are "NHD",
            [unit, head, token, 2 * dim] when its `pages` are "fused". Row ``block_table(addrs)[layer, i]`` is that
            layer of block i. Rows overlap, but not those of the pool's own blocks. It keeps the memory, and does not
            synchronise.

        Raises:
            StateError: The model was loaded with ``pieces="whole"``: use `tensor`.
            ArgumentError, ArgumentTypeError, ClosedError: As everywhere.
        """
        medium = one_medium(medium)
        layout = self.kv_layout
        if not self._layered or isinstance(layout, RawLayout):
            raise StateError("blocks of this pool lie in one piece: use tensor()")
        rows = max(0, self._units[int(medium)] - self._block_units // self._pieces + 1)
        shape, strides = kv_view(layout, rows, self._block_stride)
        del shape[1], strides[1]  # the layers
        return self._view(int(medium), shape, strides, layout.dtype)

    def block_table(self, addrs: AddressVector) -> NDArray[np.int32]:
        """Where blocks lie: the first unit of each, or of each of their layers. Thread-safe.

        Args:
            addrs: n addresses of this pool's blocks. They must not be freed, evicted or moved as long as the table is
                used: hold them, as active blocks or by a match.

        Returns:
            int32 [layers, n] with ``pieces="layer"``, for `pages`; otherwise int32 [n], which are `kvpool.block_ids`.

        Raises:
            StaleAddress, NotOwner, ArgumentError, ArgumentTypeError, ClosedError: As everywhere.
        """
        table = self._block_table(addrs)
        return table if self._layered else table[0]


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
