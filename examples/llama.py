"""A small Llama that keeps its KV cache in kvpool blocks, and nowhere else.

The architecture is Llama's: RMSNorm, rotary positions, grouped-query attention, SwiGLU. The weights are random (a fixed
seed), the tokens are bytes. It runs on the CPU in float32.

One rule makes the cache exact. The unit of computation is a *tile*: the `block_tokens` tokens of one block, at their
absolute place in the sequence, padded when the block is not full yet. Prefill runs all tiles through one layer after
another, so that a layer's KV can be sent while the next is computed; a decode step runs the tile of the block it is in
once more. So a token is always computed by the same kernels on the same shapes, whatever was cached and however the
prompt was split, and its K, V and logits come out the same bit for bit. An engine that batches for speed gives this up
and compares within a tolerance instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BOS, EOS, PAD = 256, 257, 258
VOCAB = 259


def encode(text: str) -> list[int]:
    """Byte-level tokens: token i < 256 is the byte i."""
    return list(text.encode("utf-8"))


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of the model. The default has 3.0 million parameters."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 704
    block_tokens: int = 16
    tokens_max: int = 4096
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2 or self.tokens_max % self.block_tokens:
            raise ValueError(f"heads must divide into kv_heads, head_dim by 2, tokens_max into blocks: {self}")

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn + 2 * self.hidden) + (2 * VOCAB + 1) * self.hidden


@dataclass(frozen=True)
class LayerWeights:
    """Matrices are stored [in, out], so that `x @ weight` needs no transpose."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [hidden, (heads + 2 * kv_heads) * head_dim]
    out: Tensor  # [heads * head_dim, hidden]
    ffn_norm: Tensor  # [hidden]
    gate_up: Tensor  # [hidden, 2 * ffn]
    down: Tensor  # [ffn, hidden]


class PagedKV:
    """K and V of all sequences, as the pool's blocks hold them: [block, layer, k/v, kv head, token, dim].

    Reads and writes go straight to the pool's memory; this class owns no KV. Who may write a block is the engine's
    business: only the owner of an active block, never of a cached one.
    """

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks

    def write(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        """Stores one tile's K and V, [kv head, token, dim], into its block."""
        self._blocks[block, layer, 0] = k
        self._blocks[block, layer, 1] = v

    def read(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a sequence, [kv head, token, dim] each, gathered from its blocks as the operand of one matmul."""
        kv = self._blocks[:, layer].permute(1, 2, 0, 3, 4).index_select(2, block_ids)
        k, v = kv.flatten(2, 3)
        return k, v


class Llama:
    """The model: its weights and its forward pass. Immutable once built; engines may share it."""

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            matrix: Tensor = torch.randn(rows, columns, generator=generator) * (gain / rows**0.5)
            return matrix

        c = config
        # Residual branches are scaled down with depth, as GPT-2 does. Queries and keys are scaled up, so that attention
        # is about something, and so are logits, so that the best token wins by much more than rounding.
        residual = (2 * c.layers) ** -0.5
        self.embedding = torch.randn(VOCAB, c.hidden, generator=generator)
        self.layers = [
            LayerWeights(
                attention_norm=torch.ones(c.hidden),
                qkv=torch.cat(
                    [
                        weight(c.hidden, c.heads * c.head_dim, gain=2.0),
                        weight(c.hidden, c.kv_heads * c.head_dim, gain=2.0),
                        weight(c.hidden, c.kv_heads * c.head_dim),
                    ],
                    dim=1,
                ),
                out=weight(c.heads * c.head_dim, c.hidden, gain=4.0 * residual),
                ffn_norm=torch.ones(c.hidden),
                gate_up=weight(c.hidden, 2 * c.ffn, gain=2.0),
                down=weight(c.ffn, c.hidden, gain=2.0 * residual),
            )
            for _ in range(c.layers)
        ]
        self.norm = torch.ones(c.hidden)
        self.unembedding = weight(c.hidden, VOCAB, gain=4.0)
        self._cos, self._sin = _rotary_tables(c)
        above = torch.ones(c.block_tokens, c.block_tokens, dtype=torch.bool).triu(1)
        self._causal = torch.zeros(c.block_tokens, c.block_tokens).masked_fill(above, float("-inf"))

    def forward(
        self,
        tokens: Tensor,
        kv: PagedKV,
        block_ids: Tensor,
        first_block: int,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Logits [VOCAB] that follow the last of `tokens`.

        Computes the tiles from `first_block` to the end and writes their K and V into `block_ids[first_block:]`; the
        blocks before it are only read. REQUIRES: they hold the K and V of `tokens[: first_block * block_tokens]`;
        block_ids (int64) has one block for each tile; at least one tile is to be computed. `on_layer` is called with
        each layer whose K and V of all blocks are there, while the next one is not begun.
        """
        size = self.config.block_tokens
        tiles = -(-len(tokens) // size)
        if not 0 <= first_block < tiles or len(block_ids) != tiles:
            raise ValueError(f"{len(tokens)} tokens are {tiles} blocks: got {len(block_ids)}, first {first_block}")
        if len(tokens) > self.config.tokens_max:
            raise ValueError(f"{len(tokens)} tokens, the model is made for {self.config.tokens_max}")
        padded = F.pad(tokens.long(), (0, tiles * size - len(tokens)), value=PAD)
        with torch.inference_mode():
            rows = [self.embedding[tile] for tile in padded.view(tiles, size)[first_block:]]
            for layer in range(self.config.layers):
                for tile, x in enumerate(rows, first_block):
                    rows[tile - first_block] = self._layer(layer, x, kv, block_ids[: tile + 1])
                if on_layer is not None:
                    on_layer(layer)
            logits = self._rms_norm(rows[-1], self.norm) @ self.unembedding
            return logits[(len(tokens) - 1) % size]

    def _layer(self, layer: int, x: Tensor, kv: PagedKV, block_ids: Tensor) -> Tensor:
        """Runs one tile, whose block is the last of `block_ids`, through one layer: [token, hidden]."""
        weights = self.layers[layer]
        x = x + self._attention(layer, self._rms_norm(x, weights.attention_norm), kv, block_ids)
        gate, up = (self._rms_norm(x, weights.ffn_norm) @ weights.gate_up).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ weights.down

    def _attention(self, layer: int, x: Tensor, kv: PagedKV, block_ids: Tensor) -> Tensor:
        c, size = self.config, self.config.block_tokens
        start = (len(block_ids) - 1) * size
        heads = (x @ self.layers[layer].qkv).view(size, c.heads + 2 * c.kv_heads, c.head_dim).transpose(0, 1)
        q, k, v = heads[: c.heads], heads[c.heads : -c.kv_heads], heads[-c.kv_heads :]
        cos, sin = self._cos[start : start + size], self._sin[start : start + size]
        kv.write(layer, int(block_ids[-1]), _rotate(k, cos, sin), v)
        keys, values = kv.read(layer, block_ids)
        # Query heads h * group .. (h + 1) * group share KV head h: one matmul for each KV head.
        group = c.heads // c.kv_heads
        q = _rotate(q, cos, sin).reshape(c.kv_heads, group * size, c.head_dim) * c.head_dim**-0.5
        scores = (q @ keys.transpose(1, 2)).view(c.heads, size, start + size)
        scores[:, :, start:] += self._causal  # the blocks before this one are all in the past
        mixed = torch.softmax(scores, dim=-1).view(c.kv_heads, group * size, start + size) @ values
        return mixed.view(c.heads, size, c.head_dim).transpose(0, 1).reshape(size, -1) @ self.layers[layer].out

    def _rms_norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.config.norm_eps) * gain


def _rotary_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle = torch.outer(torch.arange(config.tokens_max, dtype=torch.float64), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
