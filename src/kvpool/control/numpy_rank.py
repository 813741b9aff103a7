"""One tensor-parallel rank of a Llama-like decoder in NumPy, operator by operator: what profile_ops measures on a CPU.

It computes what a real one does, on random weights, with its KV in scattered blocks. A rank of tp > 1 leaves out the
all-reduce, which is the links' time and not the operators'. Attention goes over tiles of queries, as FlashAttention-2
does, and looks at no key that the mask hides.
"""

from __future__ import annotations

import os
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.errors import Unsupported
from kvpool.policy.cost import ModelShape, matmul_of

__all__ = ["NumpyRank"]

Array = npt.NDArray[Any]

_QUERY_TILE: Final = 128
_EPSILON: Final = 1e-5


class _Layer(NamedTuple):
    """Weights are stored [in, out]."""

    norms: Array  # [2, hidden]
    qkv: Array
    attn_out: Array
    gate_up: Array
    down: Array
    kv: Array  # [block, k/v, kv head, token, dim]


class NumpyRank:
    """One rank. Not thread-safe: it reuses its buffers.

    Args:
        model: The shape of the whole model; float32 or float16.
        tokens_max: The longest prompt.
        tp: Of how many ranks this is one.
        block_tokens: Tokens a block of KV.
        seed: Of the weights.
    """

    def __init__(self, model: ModelShape, tokens_max: int, tp: int = 1, block_tokens: int = 16, seed: int = 0) -> None:
        if model.dtype not in ("float32", "float16"):
            raise Unsupported(f"NumPy does not compute in {model.dtype}; it does in float32 and float16")
        self.model, self.tp, self.block_tokens = model, tp, block_tokens
        self.heads, self.kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
        self.ffn = model.ffn // tp
        self._random = random = np.random.default_rng(seed)
        blocks = -(-tokens_max // block_tokens)

        def weight(*shape: int) -> Array:
            normal = random.standard_normal(shape, np.float32)
            return np.asarray(normal / np.float32(shape[0] ** 0.5), model.dtype)

        self.table = random.permutation(blocks)  # of the one sequence that there is
        self.layers = [
            _Layer(
                norms=np.ones((2, model.hidden), model.dtype),
                qkv=weight(*matmul_of("qkv", model, tp)),
                attn_out=weight(*matmul_of("attn_out", model, tp)),
                gate_up=weight(*matmul_of("gate_up", model, tp)),
                down=weight(*matmul_of("down", model, tp)),
                kv=weight(blocks, 2, self.kv_heads, block_tokens, model.head_dim),
            )
            for _ in range(model.layers)
        ]
        self.vocabulary = weight(model.vocab, model.hidden)
        self.head = weight(model.hidden, -(-model.vocab // tp))
        angles = np.outer(np.arange(tokens_max), 10_000.0 ** (-np.arange(0, model.head_dim, 2) / model.head_dim))
        self._cos, self._sin = np.cos(angles).astype(model.dtype), np.sin(angles).astype(model.dtype)

    def use(self, kv: Array, blocks: npt.NDArray[np.int64]) -> None:
        """Reads and writes the sequence in blocks of another's: from now on, in place of those of `tokens_max`.

        Args:
            kv: A view of a pool, [block, layer, k/v, kv head, token, dim].
            blocks: The numbers of the sequence's blocks, in order.
        """
        self.layers = [layer._replace(kv=kv[:, number]) for number, layer in enumerate(self.layers)]
        self.table = blocks

    @property
    def name(self) -> str:
        """The name of the library, with its version."""
        return f"numpy {np.__version__}"

    def units(self) -> int:
        """Cores that BLAS uses: what OPENBLAS_NUM_THREADS, OMP_NUM_THREADS or the affinity mask says."""
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
            value = os.environ.get(name, "")
            if value.isdigit() and int(value) > 0:
                return int(value)
        return len(os.sched_getaffinity(0))

    def wait(self) -> None:
        """Returns when everything is done: it is."""

    def normal(self, *shape: int) -> Array:
        """Random numbers."""
        return self._random.standard_normal(shape, np.float32).astype(self.model.dtype)

    def ids(self, count: int) -> npt.NDArray[np.int64]:
        """Random token ids."""
        return self._random.integers(0, self.model.vocab, count)

    def contiguous(self, x: Array) -> Array:
        """A contiguous copy, or `x` itself if it is contiguous."""
        return np.ascontiguousarray(x)

    def join(self, first: Array, second: Array) -> Array:
        """Rows of the first, then those of the second."""
        return np.concatenate((first, second))

    def prefill(self, ids: npt.NDArray[np.int64], cached: int = 0) -> Array:
        """Logits of the last of `ids`, [1, vocab / tp]; the KV of the first `cached` of them is there."""
        new, total = len(ids) - cached, len(ids)
        stream = self.embedding(ids[cached:])
        for layer in range(self.model.layers):
            q, k, v = self.rope(self.qkv(layer, self.norm(layer, stream, 0)), cached)
            self.kv_store(layer, k, v, cached)
            keys, values = self.gather(layer, total)
            self.residual(stream, self.attn_out(layer, self.attention(q, keys, values, cached)))
            hidden = self.activation(self.gate_up(layer, self.norm(layer, stream, 1)))
            self.residual(stream, self.down(layer, hidden))
        return self.lm_head(stream[new - 1 :])

    # ---- compute-bound

    def qkv(self, layer: int, x: Array) -> Array:
        """[new, hidden] -> [new, (heads + 2 kv_heads) head_dim]."""
        return x @ self.layers[layer].qkv

    def attn_out(self, layer: int, x: Array) -> Array:
        """[new, heads head_dim] -> [new, hidden]."""
        return x @ self.layers[layer].attn_out

    def gate_up(self, layer: int, x: Array) -> Array:
        """[new, hidden] -> [new, 2 ffn]."""
        return x @ self.layers[layer].gate_up

    def down(self, layer: int, x: Array) -> Array:
        """[new, ffn] -> [new, hidden]."""
        return x @ self.layers[layer].down

    # ---- memory-bound

    def attention(self, q: Array, keys: Array, values: Array, cached: int) -> Array:
        """Q [kv head, group, new, dim] over keys and values [kv head, total, dim] -> [new, heads head_dim]."""
        kv_heads, group, new, dim = q.shape
        out = np.empty((new, kv_heads, group, dim), q.dtype)
        scale = q.dtype.type(dim**-0.5)
        for first in range(0, new, _QUERY_TILE):
            last = min(first + _QUERY_TILE, new)
            seen = cached + last
            tile = (q[:, :, first:last] * scale).reshape(kv_heads, -1, dim)
            scores = (tile @ keys[:, :seen].transpose(0, 2, 1)).reshape(kv_heads, group, last - first, seen)
            hidden = np.triu(np.full((last - first, last - first), -np.inf, q.dtype), 1)
            scores[..., cached + first :] += hidden
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            total = scores.sum(axis=-1)
            mixed = scores.reshape(kv_heads, -1, seen) @ values[:, :seen]
            mixed = mixed.reshape(kv_heads, group, last - first, dim) / total[..., None]
            out[first:last] = mixed.transpose(2, 0, 1, 3)
        return out.reshape(new, -1)

    def gather(self, layer: int, total: int, block_tokens: int = 0) -> tuple[Array, Array]:
        """K and V of the first `total` tokens, [kv head, total, dim] each, out of their blocks.

        `block_tokens` reads the same memory as blocks of another size, for measuring.
        """
        kv = self.layers[layer].kv
        table = self.table[: -(-total // self.block_tokens)]
        if block_tokens:
            step = block_tokens // self.block_tokens
            kv = kv[: len(kv) // step * step].reshape(-1, 2, self.kv_heads, block_tokens, kv.shape[-1])
            table = np.arange(-(-total // block_tokens))[::-1]
        both = kv[table].transpose(1, 2, 0, 3, 4).reshape(2, self.kv_heads, -1, kv.shape[-1])
        return both[0, :, :total], both[1, :, :total]

    def lm_head(self, x: Array) -> Array:
        """Last tokens [prompts, hidden] -> logits [prompts, vocab / tp]; with the last norm."""
        return self._normed(x, self.layers[0].norms[0]) @ self.head

    # ---- constant

    def embedding(self, ids: npt.NDArray[np.int64]) -> Array:
        """[new] -> [new, hidden]."""
        return self.vocabulary[ids]

    def norm(self, layer: int, x: Array, which: int) -> Array:
        """RMSNorm of [new, hidden]."""
        return self._normed(x, self.layers[layer].norms[which])

    def _normed(self, x: Array, weight: Array) -> Array:
        mean = np.einsum("ij,ij->i", x, x) / x.shape[1]
        normed: Array = x * (1.0 / np.sqrt(mean + x.dtype.type(_EPSILON)))[:, None] * weight
        return normed.astype(x.dtype, copy=False)

    def residual(self, stream: Array, x: Array) -> None:
        """Stream += x."""
        stream += x

    def rope(self, qkv: Array, first: int) -> tuple[Array, Array, Array]:
        """Splits into heads, and turns q and k by their positions, the first of which is `first`.

        Returns q [kv head, group, new, dim], k and v [kv head, new, dim].
        """
        new, dim = len(qkv), self.model.head_dim
        turned, kept = self.heads + self.kv_heads, self.kv_heads
        heads = qkv.reshape(new, turned + kept, dim).transpose(1, 0, 2)
        cos, sin = self._cos[first : first + new], self._sin[first : first + new]
        even, odd = heads[:turned, :, 0::2], heads[:turned, :, 1::2]
        out = np.empty((turned, new, dim), qkv.dtype)
        out[:, :, 0::2] = even * cos - odd * sin
        out[:, :, 1::2] = even * sin + odd * cos
        q = out[: self.heads].reshape(self.kv_heads, -1, new, dim)
        return q, out[self.heads :], np.ascontiguousarray(heads[turned:])

    def activation(self, gate_up: Array) -> Array:
        """SwiGLU: [new, 2 ffn] -> [new, ffn]."""
        gate, up = gate_up[:, : self.ffn], gate_up[:, self.ffn :]
        hidden: Array = gate / (1.0 + np.exp(-gate)) * up
        return hidden

    def kv_store(self, layer: int, k: Array, v: Array, first: int) -> None:
        """Writes K and V [kv head, new, dim] of the tokens from `first` on into their blocks."""
        places = np.arange(first, first + k.shape[1])
        blocks, inside = self.table[places // self.block_tokens], places % self.block_tokens
        kv = self.layers[layer].kv
        kv[blocks, 0, :, inside] = k.transpose(1, 0, 2)
        kv[blocks, 1, :, inside] = v.transpose(1, 0, 2)
