"""A cost model of a running engine, from how long its steps took.

A profile measures operators alone. What an engine adds to them (its scheduler, sampling, copies between kernels) is in
the times of its steps, and so is how its kernels really do. A step that computes n tokens after c others for each of
its requests is taken to last

    a sum(n c) + b sum(n^2) + c sum(n + c) + d requests + e sum(n) + f ceil(sum(n) / tile) + g

with no coefficient below zero. The first four are attention's and a request's, the next two the layers' over all rows,
in tiles, and the last is a step's. Each step counts by its relative error; then all are scaled so that all steps
together take as long as they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy.cost.compiled import Fits
from kvpool.policy.cost.fit import Floats, fit_nonnegative, relative_residual
from kvpool.policy.cost.model import CostModel
from kvpool.policy.cost.operators import OPERATORS, matmul_of
from kvpool.policy.cost.shape import ModelShape
from kvpool.policy.cost.waves import WaveModel

__all__ = ["Step", "fit_steps"]

_TILES: Final = (1, 8, 16, 32, 64, 128, 256)
_COEFFICIENTS: Final = 7
_NORMS: Final = OPERATORS["norm"].per_layer


@dataclass(frozen=True)
class Step:
    """One step of an engine: a forward pass, and what goes before and after it.

    Attributes:
        seconds: How long it took, above 0.
        parts: Of each of its requests, the tokens that it computed, at least 1, and the tokens that were there before.
            A request that decodes computes one.
    """

    seconds: float
    parts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not (isfinite(self.seconds) and self.seconds > 0):
            raise ArgumentError(f"a step of {self.seconds} seconds")
        if not self.parts or any(new < 1 or before < 0 for new, before in self.parts):
            raise ArgumentError(f"a step that computes (tokens, after others) {self.parts}")


def fit_steps(model: ModelShape, steps: Sequence[Step], block_tokens: int = 16) -> CostModel:
    """The cost model of one engine with one rank, for the simulator and for a router in front of it.

    Args:
        model: Its shape. The widths decide only how the time of the layers is shared among their products.
        steps: Measured ones: prompts and decoding, few and many requests, short and long contexts. What they do not
            cover is extrapolated.
        block_tokens: Tokens a block of KV.

    Raises:
        ArgumentError: There are fewer steps than coefficients, which are 7.
    """
    if len(steps) < _COEFFICIENTS:
        raise ArgumentError(f"{len(steps)} steps; a fit takes at least {_COEFFICIENTS}")
    seconds = np.array([step.seconds for step in steps])
    best, best_tile, best_residual = np.zeros(_COEFFICIENTS), 1, float("inf")
    for tile in _TILES:
        features = _features(steps, tile)
        found = fit_nonnegative(features, seconds)
        residual = relative_residual(features @ found, seconds)
        if residual < best_residual:
            best, best_tile, best_residual = found, tile, residual
    scale = seconds.sum() / (_features(steps, best_tile) @ best).sum()
    return CostModel(model, _fits(model, best * scale, best_tile), block_tokens=block_tokens)


def _features(steps: Sequence[Step], tile: int) -> Floats:
    """float64, [step, coefficient]."""
    rows = []
    for step in steps:
        parts = np.array(step.parts, dtype=np.float64)
        new, before = parts[:, 0], parts[:, 1]
        total = new.sum()
        rows.append(
            [new @ before, new @ new, total + before.sum(), len(parts), total, float(-(-int(total) // tile)), 1.0]
        )
    return np.array(rows)


def _fits(model: ModelShape, found: Floats, tile: int) -> Fits:
    """The coefficients as those of the operators that have such terms."""
    new_before, new_2, tokens, requests, new, tiles, step = (found / model.layers).tolist()
    products = [matmul_of(name, model) for name, operator in OPERATORS.items() if operator.kind == "compute"]
    flops = 2.0 * tile * sum(product.inner * product.columns for product in products)  # of a layer and a tile of rows
    endless = float("inf")
    waves = WaveModel(1, tile, 1, flops / tiles if tiles else endless, endless, 0.0)
    linear = {
        "attention": (new_before, new_2, tokens, 0.0, requests),
        "norm": (new / _NORMS, step / _NORMS),
    }
    return Fits(waves, linear)
