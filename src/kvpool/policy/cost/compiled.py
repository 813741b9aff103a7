"""A cost model folded into a few numbers, so that a router can evaluate it a thousand times a millisecond.

All operators but the matrix products are linear in the same monomials, and so is communication: their sum is one vector
of coefficients. The four matrix products remain, whose waves are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.policy.cost.fit import Floats
from kvpool.policy.cost.operators import (
    BLOCKS,
    CACHED,
    EACH_PROMPT,
    MONOMIALS,
    NEW,
    NEW_2,
    NEW_CACHED,
    ONE,
    OPERATORS,
    PROMPTS,
    TOKENS,
    Operator,
    Work,
    dot,
    matmul_of,
)
from kvpool.policy.cost.shape import ModelShape, Parallel
from kvpool.policy.cost.waves import WaveModel, wave_count

__all__ = ["Compiled", "Fits", "OperatorCost"]

_KNOWN_MAX: Final = 1 << 14  # of lengths, whose products are kept


@dataclass(frozen=True)
class Fits:
    """The fitted numbers, for one rank.

    Attributes:
        waves: Of all compute-bound operators.
        linear: Coefficients of each other operator, in the order of its `features`.
    """

    waves: WaveModel
    linear: Mapping[str, tuple[float, ...]]


class OperatorCost:
    """One run of one operator on one of `tp` ranks."""

    def __init__(self, operator: Operator, model: ModelShape, fits: Fits, tp: int) -> None:
        self.coefficients = [0.0] * len(MONOMIALS)  # of MONOMIALS; seconds
        self.column_tiles = 0  # tiles side by side, of a compute-bound operator
        self.full_wave_s = 0.0
        self._waves = fits.waves
        if operator.kind == "compute":
            matmul = matmul_of(operator.name, model, tp)
            self.column_tiles = -(-matmul.columns // fits.waves.tile_columns)
            self.full_wave_s = fits.waves.full_wave_s(matmul.inner)
            self.coefficients[ONE] = fits.waves.fixed_s(matmul, model.itemsize)
            return
        for feature, coefficient in zip(operator.features, fits.linear.get(operator.name, ()), strict=False):
            shared = operator.split and (feature != ONE or operator.fixed_split)
            self.coefficients[feature] = coefficient / tp if shared else coefficient

    def time_s(self, work: Work) -> float:
        """Seconds."""
        linear = dot(self.coefficients, work.monomials())
        if not self.column_tiles:
            return linear
        waves = self._waves
        row_tiles = -(-work.new // waves.tile_rows)
        return linear + wave_count(row_tiles, self.column_tiles, waves.units) * self.full_wave_s


class Compiled:
    """The cost of a number of layers, and of the operators that a forward pass runs once.

    Args:
        model: The shape.
        fits: For one rank.
        parallel: The division among ranks.
        layers: The number of layers: all of the model, or those of one stage.
        sends: How often activations go to the next stage.
    """

    def __init__(self, model: ModelShape, fits: Fits, parallel: Parallel, layers: int, sends: int) -> None:
        each, shared = np.zeros(len(MONOMIALS)), np.zeros(len(MONOMIALS))
        self._products: list[tuple[int, float]] = []  # tiles side by side, and seconds of a wave in all layers
        for operator in OPERATORS.values():
            runs = operator.per_layer * layers + operator.once
            cost = OperatorCost(operator, model, fits, parallel.tp)
            into = each if operator.name in EACH_PROMPT else shared
            into += runs * np.array(cost.coefficients)
            if cost.column_tiles:
                self._products.append((cost.column_tiles, runs * cost.full_wave_s))
        fixed_s, per_token_s = communication(model, parallel, layers, sends)
        shared[ONE] += fixed_s
        shared[NEW] += per_token_s
        self._waves = fits.waves
        self._known: dict[int, float] = {}  # seconds of all products, by tiles above each other
        self._each = tuple(each.tolist())
        self._shared = tuple(shared.tolist())
        self._one_s = dot(self._each, Work(1, 0, 1).monomials())
        self._all: tuple[float, ...] = tuple((each + shared).tolist())
        self._column_tiles = np.array([tiles for tiles, _ in self._products], dtype=np.int64)
        self._wave_s = np.array([seconds for _, seconds in self._products])

    def time_s(self, work: Work) -> float:
        """Seconds for one prompt."""
        return self.prompt_s(work.new, work.cached, work.blocks)

    def prompt_s(self, new: int, cached: int, blocks: int) -> float:
        """As time_s, for a router that asks several times in each decision: the same sums, written out."""
        at = self._all
        linear = at[0] * (new * cached) + at[1] * (new * new) + at[2] * (new + cached) + at[3] * new + at[4] * cached
        return linear + at[5] * blocks + at[6] + at[7] + self._products_s(new)

    def batch_s(self, works: Sequence[Work], ones: int = 0) -> float:
        """Seconds for several prompts in one forward pass, and for `ones` prompts of one token."""
        each, shared = self._each, self._shared
        alone = ones * self._one_s
        new = blocks = prompts = ones
        cached = 0
        for work in works:  # written out: a simulator asks for each step
            n, c, b, p = work
            alone += each[0] * (n * c) + each[1] * (n * n) + each[2] * (n + c) + each[3] * n + each[4] * c
            alone += each[5] * b + each[6] * p + each[7]
            new, cached, blocks, prompts = new + n, cached + c, blocks + b, prompts + p
        together = shared[0] * (new * cached) + shared[1] * (new * new) + shared[2] * (new + cached) + shared[3] * new
        together += shared[4] * cached + shared[5] * blocks + shared[6] * prompts + shared[7]
        return alone + together + self._products_s(new)

    def equal_s(self, work: Work, prompts: int) -> float:
        """As batch_s for equal prompts, without looking at each."""
        together = Work(*(prompts * part for part in work))
        alone = prompts * dot(self._each, work.monomials())
        return alone + dot(self._shared, together.monomials()) + self._products_s(together.new)

    def many_s(self, tokens: int, blocks: int, cached: npt.NDArray[np.int64]) -> Floats:
        """time_s for one prompt and many cached lengths, each below `tokens`; float64."""
        at = self._all
        new = tokens - cached
        fixed = at[TOKENS] * tokens + at[BLOCKS] * blocks + at[PROMPTS] + at[ONE]
        total: Floats = (at[NEW_CACHED] * cached + at[NEW_2] * new + at[NEW]) * new + at[CACHED] * cached + fixed
        row_tiles = -(-new // self._waves.tile_rows)
        waves = -(-(row_tiles[:, None] * self._column_tiles) // self._waves.units)
        total += waves @ self._wave_s
        return total

    def _products_s(self, new: int) -> float:
        row_tiles = -(-new // self._waves.tile_rows)
        known = self._known.get(row_tiles)
        if known is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            units = self._waves.units
            known = 0.0
            for tiles, seconds in self._products:
                known += -(-row_tiles * tiles // units) * seconds  # wave_count
            self._known[row_tiles] = known
        return known


def communication(model: ModelShape, parallel: Parallel, layers: int, sends: int) -> tuple[float, float]:
    """Seconds of all-reduces and of sending activations on: a fixed part, and a part per new token."""
    token_bytes = model.hidden * model.itemsize
    fixed_s = per_token_s = 0.0
    if parallel.tp_link is not None:
        at_zero = 2 * layers * parallel.tp_link.all_reduce_s(0, parallel.tp)
        fixed_s += at_zero
        per_token_s += 2 * layers * parallel.tp_link.all_reduce_s(token_bytes, parallel.tp) - at_zero
    if parallel.pp_link is not None:
        at_zero = sends * parallel.pp_link.time_s(0)
        fixed_s += at_zero
        per_token_s += sends * parallel.pp_link.time_s(token_bytes) - at_zero
    return fixed_s, per_token_s
