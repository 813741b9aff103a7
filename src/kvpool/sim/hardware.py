"""Models and GPUs by name, and their cost model when nothing was measured: a roofline.

A GPU's figures are those of its data sheet (dense BF16). Matrix products reach 60 % of its arithmetic, attention 35 %,
and reads 80 % of its bandwidth; a kernel costs some microseconds. The times of reading weights and of computing are
added, as in the wave model, not overlapped: near the knee of the roofline this is up to twice too slow. So the model
compares policies and sizes well, and estimates roughly how many GPUs; for better figures measure a profile
(`profile_ops`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.policy import cost

__all__ = ["GPUS", "MODELS", "Gpu", "kv_room_gb", "roofline", "weight_bytes"]

_PRODUCTS, _ATTENTION, _BANDWIDTH = 0.6, 0.35, 0.8  # shares of the data sheet
_KERNEL_S: Final = 2e-6
_TILE_ROWS, _TILE_COLUMNS = 16, 128
_USABLE: Final = 0.9  # of a GPU's memory; the rest is for activations and the library


@dataclass(frozen=True)
class Gpu:
    """A device, by its data sheet.

    Attributes:
        memory_gb: 10^9 bytes.
        flops: A second, dense BF16.
        bytes_per_s: Bandwidth of its memory.
        units: SMs.
        host_bytes_per_s: To the host's DRAM.
        net_bytes_per_s: To other machines, its share of a server's network.
        peer_bytes_per_s: To the other GPUs of an instance, each way.
        batch_tokens: Tokens of a step, as vLLM's server has it by default (`EngineArgs.get_batch_defaults`): 8,192
            with 70 GiB and more, except the A100, and else 2,048.
        batch_requests: Requests at a time, likewise: 1,024 or 256.
    """

    memory_gb: float
    flops: float
    bytes_per_s: float
    units: int
    host_bytes_per_s: float
    net_bytes_per_s: float
    peer_bytes_per_s: float
    batch_tokens: int = 2048
    batch_requests: int = 256


GPUS: Final[Mapping[str, Gpu]] = {
    "A100-40GB": Gpu(40, 312e12, 1.555e12, 108, 25e9, 25e9, 300e9),
    "A100-80GB": Gpu(80, 312e12, 2.039e12, 108, 25e9, 25e9, 300e9),
    "H100-80GB": Gpu(80, 989e12, 3.35e12, 132, 55e9, 50e9, 450e9, 8192, 1024),
    "H200-141GB": Gpu(141, 989e12, 4.8e12, 132, 55e9, 50e9, 450e9, 8192, 1024),
    "L40S-48GB": Gpu(48, 362e12, 0.864e12, 142, 25e9, 25e9, 32e9),
    "RTX4090-24GB": Gpu(24, 165e12, 1.008e12, 128, 25e9, 1.25e9, 32e9),
}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> cost.ModelShape:
    return cost.ModelShape(layers, hidden, heads, kv_heads, ffn, vocab, dtype="bfloat16")


MODELS: Final[Mapping[str, cost.ModelShape]] = {
    "llama-30b": _llama(60, 6656, 52, 52, 17920, 32000),
    "llama-65b": _llama(80, 8192, 64, 64, 22016, 32000),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000),
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, 152064),
}


def weight_bytes(model: cost.ModelShape) -> int:
    """Bytes of all parameters; embedding and output are separate."""
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    layer = model.hidden * (heads + 3 * model.ffn)
    return (model.layers * layer + 2 * model.hidden * model.vocab) * model.itemsize


def kv_room_gb(model: cost.ModelShape, gpu: Gpu, tp: int = 1) -> float:
    """What the weights leave of `tp` GPUs for KV, 10^9 bytes. Raises ArgumentError where they leave nothing."""
    room = _USABLE * gpu.memory_gb * tp - weight_bytes(model) / 1e9
    if room <= 0:
        raise ArgumentError(
            f"the weights take {weight_bytes(model) / 1e9:.0f} GB, {tp} x {gpu.memory_gb:g} GB leave no room for KV: "
            "spread the model over more GPUs (tp)"
        )
    return room


def roofline(model: cost.ModelShape, gpu: Gpu, tp: int = 1, block_tokens: int = 16) -> cost.CostModel:
    """A cost model from a data sheet. Raises ArgumentError when the model cannot be split over `tp` GPUs."""
    bandwidth = _BANDWIDTH * gpu.bytes_per_s
    products = _PRODUCTS * gpu.flops
    number = model.itemsize
    pair = 4 * model.heads * model.head_dim / (_ATTENTION * gpu.flops)  # a query and a key: QK and PV
    kv = 2 * model.kv_heads * model.head_dim * number / bandwidth  # a token of a layer, read once
    wide = model.hidden * number / bandwidth
    lm_head = model.hidden * model.vocab
    host = gpu.host_bytes_per_s * _BANDWIDTH
    fits = cost.Fits(
        cost.WaveModel(gpu.units, _TILE_ROWS, _TILE_COLUMNS, products, bandwidth, _KERNEL_S),
        {
            "attention": (pair, pair / 2, kv, 2 * wide, 2 * _KERNEL_S),
            "lm_head": (2 * lm_head / products, lm_head * number / bandwidth + _KERNEL_S),
            "swap_in": (model.kv_bytes_per_token / host, 0.0, 1e-5),
            "embedding": (2 * wide, _KERNEL_S),
            "norm": (2 * wide, _KERNEL_S),
            "residual": (3 * wide, _KERNEL_S),
            "rope": (4 * wide, _KERNEL_S),
            "activation": (3 * model.ffn * number / bandwidth, _KERNEL_S),
            "kv_store": (kv, _KERNEL_S),
        },
    )
    link = cost.Link(gpu.peer_bytes_per_s * _BANDWIDTH, latency_s=5e-6) if tp > 1 else None
    return cost.CostModel(model, fits, cost.Parallel(tp=tp, tp_link=link), block_tokens)
