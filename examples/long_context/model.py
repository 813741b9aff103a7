"""A small Llama in NumPy: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Its weights are random and fixed.

It computes everything but attention, which the caller does between `project` and `finish_layer`, wherever K and V are.

A matrix product of 16 rows may round otherwise than 16 products of one row. So what a token's K and V are, bit for bit,
depends on which tokens are computed with it. `engine.steps` fixes that by the positions of the tokens, and so every
process, and every later computation, gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]

_NORM_EPSILON: Final = np.float32(1e-5)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. A token is a byte."""

    layers: int = 3
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 352
    vocabulary: int = 256
    tokens_max: int = 1 << 16
    rope_theta: float = 100_000.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"heads must divide into kv_heads, and head_dim by 2: {self}")


@dataclass(frozen=True)
class _Layer:
    """Matrices are stored [in, out]."""

    qkv: Floats  # [hidden, (heads + 2 * kv_heads) * head_dim]
    out: Floats  # [heads * head_dim, hidden]
    gate_up: Floats  # [hidden, 2 * ffn]
    down: Floats  # [ffn, hidden]


class Model:
    """The weights, and what is computed with them. Immutable; equal seeds give equal weights in every process."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        c = self.config = config
        rng = np.random.default_rng(seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> Floats:
            return rng.standard_normal((rows, columns), np.float32) * np.float32(gain / rows**0.5)

        # Residual branches are scaled down with depth, as GPT-2 does. Queries and keys are scaled up, so that attention
        # chooses among tokens and an answer depends on what stands thousands of tokens before it.
        residual = (2 * c.layers) ** -0.5
        self._embedding = rng.standard_normal((c.vocabulary, c.hidden), np.float32)
        self._layers = [
            _Layer(
                qkv=np.concatenate(
                    [
                        weight(c.hidden, c.heads * c.head_dim, gain=2.0),
                        weight(c.hidden, c.kv_heads * c.head_dim, gain=2.0),
                        weight(c.hidden, c.kv_heads * c.head_dim),
                    ],
                    axis=1,
                ),
                out=weight(c.heads * c.head_dim, c.hidden, gain=4.0 * residual),
                gate_up=weight(c.hidden, 2 * c.ffn, gain=2.0),
                down=weight(c.ffn, c.hidden, gain=2.0 * residual),
            )
            for _ in range(c.layers)
        ]
        self._unembedding = weight(c.hidden, c.vocabulary, gain=4.0)
        self._cos, self._sin = _rotary_tables(c)

    def embed(self, tokens: Tokens) -> Floats:
        """The hidden states before the first layer: [token, hidden]."""
        rows: Floats = self._embedding[tokens]
        return rows

    def project(self, layer: int, x: Floats, first: int) -> tuple[Floats, Floats, Floats]:
        """Q, K and V of the tokens from position `first` on, with their positions turned in: [token, head, dim]."""
        c = self.config
        rows = (_rms_norm(x) @ self._layers[layer].qkv).reshape(len(x), -1, c.head_dim)
        q, k, v = np.split(rows, [c.heads, c.heads + c.kv_heads], axis=1)
        cos, sin = self._cos[first : first + len(x), None], self._sin[first : first + len(x), None]
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish_layer(self, layer: int, x: Floats, attended: Floats) -> Floats:
        """The hidden states behind the layer. `attended` is what attention gave: [token, head, dim]."""
        weights = self._layers[layer]
        x = x + attended.reshape(len(x), -1) @ weights.out
        gate, up = np.split(_rms_norm(x) @ weights.gate_up, 2, axis=1)
        silu = gate / (1 + np.exp(-gate))
        result: Floats = x + (silu * up) @ weights.down
        return result

    def logits(self, x: Floats) -> Floats:
        """What follows the last token of `x`: [vocabulary]."""
        result: Floats = (_rms_norm(x[-1:]) @ self._unembedding)[0]
        return result


def _rms_norm(x: Floats) -> Floats:
    normed: Floats = x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + _NORM_EPSILON)
    return normed


def _rotary_tables(config: ModelConfig) -> tuple[Floats, Floats]:
    frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    half = np.outer(np.arange(config.tokens_max), frequency)
    angle = np.concatenate([half, half], axis=1)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    left, right = np.split(x, 2, axis=-1)
    rotated: Floats = x * cos + np.concatenate([-right, left], axis=-1, dtype=np.float32) * sin
    return rotated
