"""The operators of a prefill, and the features of each operator's time (MemServe §5.3.2).

With n new tokens after c cached ones, x = n + c, y = c / x:

    kind      operators                          time of one run
    compute   qkv, attn_out, gate_up, down       waves of thread blocks (waves.py)
    memory    attention                          a n c + b n^2 + c x + d n + e
              gather                             a x + b blocks + c
              swap_in                            a c + b blocks + d
              lm_head                            a prompts + b
    constant  embedding, norm, rope, ...         a n + b

The paper fits attention as a x^2 y + b x^2 + c x + d. Causal work is x^2 (1 - y^2) / 2, which that cannot follow. n c
and n^2 span it, for n c = x^2 y - x^2 y^2 and n^2 = x^2 - 2 x^2 y + x^2 y^2, whether or not a kernel skips what the
mask hides; and no coefficient of theirs can be below zero. `paper_attention` is the paper's form, for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final, Literal, NamedTuple

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy.cost.fit import Floats
from kvpool.policy.cost.shape import ModelShape

__all__ = [
    "MONOMIALS",
    "OPERATORS",
    "Matmul",
    "Operator",
    "Work",
    "dot",
    "feature_rows",
    "matmul_of",
    "paper_attention",
]

# What a time may depend on: the columns of feature_rows and of a compiled model.
MONOMIALS: Final = ("new * cached", "new^2", "tokens", "new", "cached", "blocks", "prompts", "1")
NEW_CACHED, NEW_2, TOKENS, NEW, CACHED, BLOCKS, PROMPTS, ONE = range(len(MONOMIALS))


class Work(NamedTuple):
    """The input of an operator: one prompt, or the sums of several.

    Attributes:
        new: Tokens to compute.
        cached: Tokens before them whose KV is there.
        blocks: Blocks of KV that are read.
        prompts: How many.
    """

    new: int
    cached: int = 0
    blocks: int = 0
    prompts: int = 1

    def monomials(self) -> tuple[int, ...]:
        """The values of MONOMIALS."""
        new, cached, blocks, prompts = self
        return new * cached, new * new, new + cached, new, cached, blocks, prompts, 1


def dot(coefficients: Iterable[float], monomials: Iterable[int]) -> float:
    """The time that coefficients give; quicker than NumPy for so few."""
    return float(sum(map(mul, coefficients, monomials)))


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: Under which a profile has its measurements.
        kind: The kind of its model.
        features: The MONOMIALS of its linear time; the last is 1. Empty for a compute-bound operator.
        per_layer: How often a layer runs it.
        once: How often a forward pass runs it outside of its layers.
        split: Whether a tensor-parallel rank does only its share of it.
        fixed_split: Whether the share also applies to the constant part, because that is the reading of weights.
    """

    name: str
    kind: Literal["compute", "memory", "constant"]
    features: tuple[int, ...] = ()
    per_layer: int = 0
    once: int = 0
    split: bool = True
    fixed_split: bool = False


_PER_TOKEN: Final = (NEW, ONE)

OPERATORS: Final[Mapping[str, Operator]] = {
    operator.name: operator
    for operator in (
        Operator("qkv", "compute", per_layer=1),
        Operator("attn_out", "compute", per_layer=1),
        Operator("gate_up", "compute", per_layer=1),
        Operator("down", "compute", per_layer=1),
        Operator("attention", "memory", (NEW_CACHED, NEW_2, TOKENS, NEW, ONE), per_layer=1),
        Operator("gather", "memory", (TOKENS, BLOCKS, ONE), per_layer=1),
        Operator("lm_head", "memory", (PROMPTS, ONE), once=1, fixed_split=True),
        Operator("swap_in", "memory", (CACHED, BLOCKS, ONE)),  # for what lies in DRAM: no part of every prefill
        Operator("embedding", "constant", _PER_TOKEN, once=1, split=False),
        Operator("norm", "constant", _PER_TOKEN, per_layer=2, split=False),
        Operator("residual", "constant", _PER_TOKEN, per_layer=2, split=False),
        Operator("rope", "constant", _PER_TOKEN, per_layer=1),
        Operator("activation", "constant", _PER_TOKEN, per_layer=1),
        Operator("kv_store", "constant", _PER_TOKEN, per_layer=1),
    )
}

# These look at each prompt of a batch alone; the others see all new tokens of a batch as one.
EACH_PROMPT: Final = frozenset({"attention", "gather"})


def feature_rows(works: Sequence[Work], features: Sequence[int]) -> Floats:
    """The chosen monomials of each; float64, [work, feature]."""
    return np.array([work.monomials() for work in works], dtype=np.float64)[:, list(features)]


def paper_attention(works: Sequence[Work]) -> Floats:
    """x^2 y, x^2, x, 1: the features of §5.3.2 (b); float64, [work, 4]."""
    rows = [((x := work.new + work.cached) * work.cached, x * x, x, 1) for work in works]
    return np.array(rows, dtype=np.float64)


class Matmul(NamedTuple):
    """A compute-bound operator on one rank: [new tokens, inner] x [inner, columns]."""

    inner: int
    columns: int


def matmul_of(name: str, model: ModelShape, tp: int = 1) -> Matmul:
    """What one of `tp` ranks multiplies. Raises ArgumentError for an operator that is not compute-bound."""
    heads, kv_heads, ffn = model.heads // tp, max(1, model.kv_heads // tp), model.ffn // tp
    shapes = {
        "qkv": Matmul(model.hidden, (heads + 2 * kv_heads) * model.head_dim),
        "attn_out": Matmul(heads * model.head_dim, model.hidden),
        "gate_up": Matmul(model.hidden, 2 * ffn),
        "down": Matmul(ffn, model.hidden),
    }
    if name not in shapes:
        raise ArgumentError(f"{name} is not compute-bound; these are: {', '.join(shapes)}")
    return shapes[name]
