"""Memory of SGLang's, made by its own classes on this CPU, with content that names each page."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 8  # tokens
LAYERS = 3
SLOTS = 128  # tokens of device memory, without the padding


def key(name: object) -> str:
    """A key as SGLang has them."""
    import hashlib

    return hashlib.sha256(str(name).encode()).hexdigest()


def keys(first: int, n: int) -> list[str]:
    return [key(i) for i in range(first, first + n)]


def mha_device(**changes: Any) -> Any:
    """Device memory of keys and values."""
    options = {
        "size": SLOTS, "page_size": PAGE, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 16, "layer_num": LAYERS,
        "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip
    return MHATokenToKVPool(**(options | changes))


def mla_device() -> Any:
    """Device memory of latents."""
    return MLATokenToKVPool(
        size=SLOTS, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=24, qk_rope_head_dim=8, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def host_memory(kind: str, layout: str) -> Any:
    """Host memory of SGLang's, not page-locked, full of numbers."""
    more = {"pin_memory": False, "device_capacity_tokens": SLOTS, "start_layer": 0, "end_layer": LAYERS}
    pool: Any
    if kind == "mha":
        pool = MHATokenToKVPoolHost(mha_device()._mha_buffer_info(), 2.0, 0, PAGE, layout, **more)
    else:
        info = mla_device()._mla_buffer_info()
        pool = MLATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, target_layer_num=LAYERS, **more)
    fill(pool.kv_buffer, 1)
    return pool


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Other numbers for each seed; none of them twice nearby."""
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def config(**extra: Any) -> HiCacheStorageConfig:
    """What SGLang hands to a storage."""
    place = {"backend_name": "kvpool", "module_path": "kvpool.engines.sglang.hicache", "class_name": "KvpoolHiCache"}
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=True, is_page_first_layout=False, model_name="m",
        extra_config={**place, "interface_v1": 1, **extra},
    )  # fmt: skip


def indices(pages: list[int]) -> torch.Tensor:
    """The slots of whole pages."""
    return torch.tensor([page * PAGE + slot for page in pages for slot in range(PAGE)], dtype=torch.int64)


def page_of(host: Any, page: int) -> torch.Tensor:
    """A copy of a page's content, as SGLang reads it."""
    return host.get_data_page(page * PAGE, flat=True).clone()
