"""Compute-bound operators: waves of thread blocks (MemServe §5.3.2 (a)).

A matrix product is cut into tiles, one thread block each, and the units (SMs of a GPU, cores of a CPU) work on as many
at a time as there are units: a wave.

    blocks = ceil(rows / tile_rows) * ceil(columns / tile_columns)
    waves  = ceil(blocks / units)
    time   = (waves - 1) * full_wave + last_wave,    full_wave = last_wave = M / N

M is the floating-point operations of a wave, N those of a second. Two terms are ours, for short prompts: the weights
have to be read (or packed) once however few rows there are, and each call costs something.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from kvpool.policy.cost.fit import fit_nonnegative, relative_residual
from kvpool.policy.cost.operators import Matmul

__all__ = ["WaveModel", "wave_count"]

_TILES: Final = (4, 8, 16, 32, 64, 128, 256)


def wave_count(row_tiles: int, column_tiles: int, units: int) -> int:
    """The number of waves of these thread blocks: eta."""
    return -(-row_tiles * column_tiles // units)


@dataclass(frozen=True)
class WaveModel:
    """The common parameters of all matrix products of a machine.

    Attributes:
        units: SMs or cores.
        tile_rows: Rows of a thread block's tile.
        tile_columns: Its columns.
        flops_per_s: N, of all units together; infinite if products are too small to show it.
        weight_bytes_per_s: How fast weights are read; infinite if that does not show.
        call_s: The cost of each call.
    """

    units: int
    tile_rows: int
    tile_columns: int
    flops_per_s: float
    weight_bytes_per_s: float
    call_s: float

    def full_wave_s(self, inner: int) -> float:
        """T_fullwave of a product over `inner`: M / N."""
        return self.units * 2.0 * self.tile_rows * self.tile_columns * inner / self.flops_per_s

    def fixed_s(self, matmul: Matmul, itemsize: int) -> float:
        """The time of a product besides its waves."""
        return self.call_s + matmul.inner * matmul.columns * itemsize / self.weight_bytes_per_s

    def time_s(self, rows: int, matmul: Matmul, itemsize: int) -> float:
        """Seconds of one product with this many rows."""
        waves = wave_count(-(-rows // self.tile_rows), -(-matmul.columns // self.tile_columns), self.units)
        full = last = self.full_wave_s(matmul.inner)
        return (waves - 1) * full + last + self.fixed_s(matmul, itemsize)

    @classmethod
    def fit(
        cls,
        samples: Iterable[tuple[int, Matmul, float]],
        units: int,
        itemsize: int,
        tiles: Sequence[int] = _TILES,
    ) -> WaveModel:
        """From measured products; one operator at several lengths is enough, several are better.

        Args:
            samples: (rows, product, seconds).
            units: SMs or cores.
            itemsize: Bytes of a weight.
            tiles: Edges that a tile may have; all pairs are tried.

        Raises:
            ArgumentError: When there are fewer than three samples.
        """
        measured = list(samples)
        rows = np.array([sample[0] for sample in measured], dtype=np.int64)
        inner = np.array([sample[1].inner for sample in measured], dtype=np.int64)
        columns = np.array([sample[1].columns for sample in measured], dtype=np.int64)
        seconds = np.array([sample[2] for sample in measured], dtype=np.float64)
        weights = (inner * columns * itemsize).astype(np.float64)
        best, best_residual = None, float("inf")
        for tile_rows, tile_columns in product(tiles, tiles):
            blocks = -(-rows // tile_rows) * -(-columns // tile_columns)
            flops = -(-blocks // units) * (units * 2.0 * tile_rows * tile_columns) * inner
            features = np.stack([flops, weights, np.ones_like(flops)], axis=1)
            per_flop, per_byte, call_s = fit_nonnegative(features, seconds).tolist()
            residual = relative_residual(features @ np.array([per_flop, per_byte, call_s]), seconds)
            if residual < best_residual:
                best_residual = residual
                flops_per_s, bytes_per_s = (1 / each if each else float("inf") for each in (per_flop, per_byte))
                best = cls(units, tile_rows, tile_columns, flops_per_s, bytes_per_s, call_s)
        assert best is not None  # the first residual is finite
        return best
