"""The same rank as numpy_rank.py in PyTorch, which the caller gives: kvpool itself does not import it.

On a CPU or a CUDA device; attention is the library's scaled_dot_product_attention. `wait` ends when all that was
started is done, for a device that computes beside the caller.
"""

from __future__ import annotations

from typing import Any, Final

from kvpool.errors import Unsupported
from kvpool.policy.cost import ModelShape, matmul_of

__all__ = ["TorchRank"]

Tensor = Any

_EPSILON: Final = 1e-5


class TorchRank:
    """One rank; the methods are those of NumpyRank, on tensors.

    Args:
        torch: The module.
        device: "cpu", "cuda:0", ...
        model: The shape of the whole model.
        tokens_max: The longest prompt.
        tp: Of how many ranks this is one.
        block_tokens: Tokens a block of KV.
        seed: Of the weights.
    """

    def __init__(
        self,
        torch: Any,
        device: str,
        model: ModelShape,
        tokens_max: int,
        tp: int = 1,
        block_tokens: int = 16,
        seed: int = 0,
    ) -> None:
        self._torch = torch
        self.device = torch.device(device)
        self._dtype = getattr(torch, model.dtype, None)
        if self._dtype is None or not self._dtype.is_floating_point:
            raise Unsupported(f"this PyTorch does not compute in {model.dtype}")
        self._random = torch.Generator(self.device).manual_seed(seed)
        self.model, self.tp, self.block_tokens = model, tp, block_tokens
        self.heads, self.kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
        self.ffn = model.ffn // tp
        blocks = -(-tokens_max // block_tokens)
        self.table = torch.randperm(blocks, generator=self._random, device=self.device)  # of the one sequence there is
        self._weights = [
            {name: self._weight(*matmul_of(name, model, tp)) for name in ("qkv", "attn_out", "gate_up", "down")}
            for _ in range(model.layers)
        ]
        self._norms = torch.ones(model.layers, 2, model.hidden, dtype=self._dtype, device=self.device)
        self._kv = self._weight(model.layers, blocks, 2, self.kv_heads, block_tokens, model.head_dim)
        self.vocabulary = self._weight(model.vocab, model.hidden)
        self.head = self._weight(model.hidden, -(-model.vocab // tp))
        places = torch.arange(tokens_max, device=self.device)
        pairs = torch.arange(0, model.head_dim, 2, device=self.device)
        angles = torch.outer(places, 10_000.0 ** (-pairs / model.head_dim))
        self._cos, self._sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    @property
    def name(self) -> str:
        """The name of the library, with its version."""
        return f"torch {self._torch.__version__}"

    def units(self) -> int:
        """SMs of the device, or threads on a CPU."""
        if self.device.type == "cuda":
            return int(self._torch.cuda.get_device_properties(self.device).multi_processor_count)
        return int(self._torch.get_num_threads())

    def wait(self) -> None:
        """Returns when everything is done."""
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)

    def normal(self, *shape: int) -> Tensor:
        """Random numbers."""
        return self._torch.randn(*shape, generator=self._random, device=self.device).to(self._dtype)

    def ids(self, count: int) -> Tensor:
        """Random token ids."""
        return self._torch.randint(self.model.vocab, (count,), generator=self._random, device=self.device)

    def contiguous(self, x: Tensor) -> Tensor:
        """A contiguous copy, or `x` itself if it is contiguous."""
        return x.contiguous()

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """As NumpyRank.join."""
        return self._torch.cat((first, second))

    def prefill(self, ids: Tensor, cached: int = 0) -> Tensor:
        """As NumpyRank.prefill."""
        stream = self.embedding(ids[cached:])
        for layer in range(self.model.layers):
            q, k, v = self.rope(self.qkv(layer, self.norm(layer, stream, 0)), cached)
            self.kv_store(layer, k, v, cached)
            keys, values = self.gather(layer, len(ids))
            self.residual(stream, self.attn_out(layer, self.attention(q, keys, values, cached)))
            self.residual(stream, self.down(layer, self.activation(self.gate_up(layer, self.norm(layer, stream, 1)))))
        return self.lm_head(stream[-1:])

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        """As NumpyRank.qkv."""
        return x @ self._weights[layer]["qkv"]

    def attn_out(self, layer: int, x: Tensor) -> Tensor:
        """As NumpyRank.attn_out."""
        return x @ self._weights[layer]["attn_out"]

    def gate_up(self, layer: int, x: Tensor) -> Tensor:
        """As NumpyRank.gate_up."""
        return x @ self._weights[layer]["gate_up"]

    def down(self, layer: int, x: Tensor) -> Tensor:
        """As NumpyRank.down."""
        return x @ self._weights[layer]["down"]

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, cached: int) -> Tensor:
        """As NumpyRank.attention."""
        torch = self._torch
        kv_heads, group, new, dim = q.shape
        total = keys.shape[1]
        mask = None
        if cached:
            seen = (
                torch.arange(total, device=self.device)[None]
                <= torch.arange(cached, total, device=self.device)[:, None]
            )
            mask = seen[None, None]
        expanded = (kv_heads, group, total, dim)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, keys[:, None].expand(expanded), values[:, None].expand(expanded), attn_mask=mask, is_causal=not cached
        )
        return mixed.permute(2, 0, 1, 3).reshape(new, -1)

    def gather(self, layer: int, total: int, block_tokens: int = 0) -> tuple[Tensor, Tensor]:
        """As NumpyRank.gather."""
        kv, table = self._kv[layer], self.table[: -(-total // self.block_tokens)]
        if block_tokens:
            step = block_tokens // self.block_tokens
            kv = kv[: len(kv) // step * step].reshape(-1, 2, self.kv_heads, block_tokens, kv.shape[-1])
            table = self._torch.arange(-(-total // block_tokens), device=self.device).flip(0)
        both = kv[table].permute(1, 2, 0, 3, 4).reshape(2, self.kv_heads, -1, kv.shape[-1])
        return both[0, :, :total], both[1, :, :total]

    def lm_head(self, x: Tensor) -> Tensor:
        """As NumpyRank.lm_head."""
        return self._normed(x, self._norms[0, 0]) @ self.head

    def embedding(self, ids: Tensor) -> Tensor:
        """As NumpyRank.embedding."""
        return self.vocabulary[ids]

    def norm(self, layer: int, x: Tensor, which: int) -> Tensor:
        """As NumpyRank.norm."""
        return self._normed(x, self._norms[layer, which])

    def residual(self, stream: Tensor, x: Tensor) -> None:
        """As NumpyRank.residual."""
        stream += x

    def rope(self, qkv: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """As NumpyRank.rope."""
        new, dim = len(qkv), self.model.head_dim
        turned = self.heads + self.kv_heads
        heads = qkv.reshape(new, turned + self.kv_heads, dim).transpose(0, 1)
        cos, sin = self._cos[first : first + new], self._sin[first : first + new]
        even, odd = heads[:turned, :, 0::2], heads[:turned, :, 1::2]
        out = self._torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).reshape(turned, new, dim)
        return out[: self.heads].reshape(self.kv_heads, -1, new, dim), out[self.heads :], heads[turned:].contiguous()

    def activation(self, gate_up: Tensor) -> Tensor:
        """As NumpyRank.activation."""
        return self._torch.nn.functional.silu(gate_up[:, : self.ffn]) * gate_up[:, self.ffn :]

    def kv_store(self, layer: int, k: Tensor, v: Tensor, first: int) -> None:
        """As NumpyRank.kv_store."""
        places = self._torch.arange(first, first + k.shape[1], device=self.device)
        blocks, inside = self.table[places // self.block_tokens], places % self.block_tokens
        self._kv[layer][blocks, 0, :, inside] = k.transpose(0, 1)
        self._kv[layer][blocks, 1, :, inside] = v.transpose(0, 1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * self._torch.rsqrt((x * x).mean(-1, keepdim=True) + _EPSILON) * weight

    def _weight(self, *shape: int) -> Tensor:
        return self.normal(*shape) / shape[0] ** 0.5
