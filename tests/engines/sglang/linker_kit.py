"""A KvpoolLinker as SGLang makes it, without an engine; and what SGLang does with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from host_kit import LAYERS, PAGE, fill, indices
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

FULL = frozenset({ComponentType.FULL})


def made(
    device: Any,
    components: Any = FULL,
    *,
    sglang: dict[str, Any] | None = None,
    stream: Any = None,
    server_args: Any = None,
    **extra: Any,
) -> Any:
    """A linker as SGLang makes it. `sglang`: of SGLang's parameters those that are not the usual ones."""
    allocator: Any = SimpleNamespace(get_kvcache=lambda: device)
    memory: dict[str, Any] = {"req_to_token_pool": None, "token_to_kv_pool_allocator": allocator, "page_size": PAGE}
    params = CacheInitParams(disable=False, **(memory | (sglang or {})))
    place = {"linker": "KvpoolLinker", "linker_module_path": "kvpool.engines.sglang.linker"}
    config = {**place, "linker_extra_config": {"dram_pages": 8} | extra}
    return create_unified_cache_linker(
        server_args, params, backend="dynamic", config=config, components=set(components), forward_stream=stream
    )


def transfer(names: list[str], pages: list[int] | None = None) -> list[Any]:
    return [PoolTransfer(PoolName.KV, keys=names, device_indices=None if pages is None else indices(pages))]


def tensors(device: Any) -> list[torch.Tensor]:
    return list(device.kv_buffer) if hasattr(device, "kv_buffer") else [*device.k_buffer, *device.v_buffer]


def content(device: Any, page: int) -> list[torch.Tensor]:
    return [tensor[page * PAGE : (page + 1) * PAGE].clone() for tensor in tensors(device)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def scramble(device: Any, seed: int) -> None:
    for number, tensor in enumerate(tensors(device)):
        fill(tensor, seed * 100 + number)


def save(linker: Any, names: list[str], pages: list[int]) -> bool:
    assert linker.offload(transfer(names, pages))
    linker._saved[-1].result(30)
    assert linker.num_completed_offloads() == 1
    return linker.pop_completed_offload()


def load(linker: Any, names: list[str], pages: list[int], rid: str = "r") -> bool:
    """Whether SGLang would get the pages; asserts that it is told in time."""
    if not linker.load(rid, transfer(names, pages)):
        return False
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        linker.layer_done_counter.wait_until(layer)
    return linker.finish_layer_wise_loading(index)


def pinned(linker: Any) -> int:
    stats = linker._store.cache.stats()
    return int(stats["blocks"] - stats["evictable"])
