"""KvpoolLinker against SGLang's base class, factory and device memory, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_kit import LAYERS, PAGE, fill, indices, key, keys, mha_device, mla_device
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

import kvpool
from kvpool.engines.sglang.linker import KvpoolLinker

FULL = frozenset({ComponentType.FULL})


def made(device: Any, components: Any = FULL, **extra: Any) -> Any:
    """A linker as SGLang makes it."""
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: device), page_size=PAGE, attn_cp_size=1,
        attn_tp_cache_group=None, tp_cache_group=None,
    )  # fmt: skip
    place = {"linker": "KvpoolLinker", "linker_module_path": "kvpool.engines.sglang.linker"}
    config = {**place, "linker_extra_config": {"dram_pages": 8} | extra}
    return create_unified_cache_linker(None, params, backend="dynamic", config=config, components=set(components))


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


@pytest.fixture
def device() -> Any:
    device = mha_device()
    scramble(device, 1)
    return device


@pytest.fixture
def linker(device: Any) -> Any:
    linker = made(device)
    yield linker
    linker.close()


def test_it_is_a_linker_of_sglang() -> None:
    assert issubclass(KvpoolLinker, UnifiedCacheLinker)
    assert not KvpoolLinker.__abstractmethods__


@pytest.mark.parametrize("make", [mha_device, mla_device])
def test_pages_come_back_into_other_slots(make: Any) -> None:
    device = make()
    scramble(device, 1)
    linker = made(device)
    before = [content(device, page) for page in (3, 5, 2)]
    assert save(linker, keys(0, 3), [3, 5, 2])
    scramble(device, 2)
    rest = content(device, 4)
    assert linker.lookup("r", transfer([*keys(0, 3), key("other")])) == [1, 2, 3]
    assert load(linker, keys(0, 3), [7, 1, 9])
    for page, wanted in zip((7, 1, 9), before, strict=True):
        assert same(content(device, page), wanted)
    assert same(content(device, 4), rest)
    linker.close()


def test_loads_of_several_requests_are_one_batch(device: Any, linker: Any) -> None:
    save(linker, keys(0, 4), [0, 1, 2, 3])
    before = [content(device, page) for page in range(4)]
    scramble(device, 2)
    assert linker.load("a", transfer(keys(0, 2), [8, 9]))
    assert linker.load("b", transfer(keys(2, 2), [10, 11]))
    assert linker.load("c", transfer(keys(0, 1), [12]))
    kept = content(device, 12)
    assert linker.cancel_queued_load("c")
    assert not linker.cancel_queued_load("c")
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    assert linker.start_layer_wise_loading() == -1
    for page in range(4):
        assert same(content(device, 8 + page), before[page])
    assert same(content(device, 12), kept)


def test_a_load_that_cannot_be_had_is_refused(device: Any, linker: Any) -> None:
    save(linker, keys(0, 2), [0, 1])
    before = content(device, 9)
    assert linker.lookup("r", transfer([key("other"), *keys(0, 2)])) == []
    assert not linker.load("r", transfer([*keys(0, 2), key("other")], [8, 9, 10]))
    assert linker.start_layer_wise_loading() == -1
    assert same(content(device, 9), before)


def test_what_was_looked_up_stays_until_it_is_loaded(linker: Any) -> None:
    save(linker, keys(0, 6), list(range(6)))
    assert len(linker.lookup("r", transfer(keys(0, 6)))) == 6
    assert save(linker, keys(10, 2), [0, 1])
    assert not save(linker, keys(20, 4), [0, 1, 2, 3])  # two pages can make room
    assert load(linker, keys(0, 6), list(range(8, 14)))
    assert save(linker, keys(20, 4), [0, 1, 2, 3])


def test_look_ups_that_are_given_up_do_not_fill_the_cache(linker: Any) -> None:
    save(linker, keys(0, 8), list(range(8)))
    for request in range(100):
        assert len(linker.lookup(f"r{request}", transfer(keys(request % 8, 1)))) == 1
    assert len(linker._lookups._hits) == 64
    linker.reset()
    assert linker._store.cache.stats()["evictable"] == 0


def test_a_copy_that_fails_is_told(linker: Any) -> None:
    save(linker, keys(0, 2), [0, 1])
    assert linker.load("r", transfer(keys(0, 2), [8, 9]))
    linker._store.pool.close()  # as if its memory were lost
    index = linker.start_layer_wise_loading()
    assert not linker.finish_layer_wise_loading(index)
    assert linker.lookup("r", transfer(keys(0, 2))) == []
    assert not linker.load("r", transfer(keys(0, 2), [8, 9]))
    assert not save(linker, keys(2, 1), [2])


def test_with_several_ranks_all_answer_alike(device: Any, linker: Any) -> None:
    linker._ranks = 2
    save(linker, keys(0, 2), [0, 1])
    before = content(device, 9)
    assert linker.load("r", transfer([*keys(0, 1), key("other")], [8, 9]))
    index = linker.start_layer_wise_loading()
    assert not linker.finish_layer_wise_loading(index)
    assert same(content(device, 9), before)


@pytest.mark.parametrize("keep", [False, True])
def test_a_flush_drops_what_is_stored_unless_it_is_to_be_kept(device: Any, keep: bool) -> None:
    linker = made(device, keep_on_flush=keep)
    save(linker, keys(0, 2), [0, 1])
    linker.offload(transfer(keys(4, 1), [4]))
    linker.load("r", transfer(keys(0, 1), [8]))
    linker.reset()
    assert linker.num_completed_offloads() == 0
    assert linker.start_layer_wise_loading() == -1
    assert linker.lookup("r", transfer(keys(0, 2))) == ([1, 2] if keep else [])
    assert save(linker, keys(0, 2), [0, 1])
    linker.close()
    linker.close()


def test_transfers_of_other_pools_are_refused(linker: Any) -> None:
    both = [*transfer(keys(0, 1), [0]), PoolTransfer(PoolName.SWA, keys=keys(0, 1), device_indices=indices([0]))]
    assert linker.lookup("r", both) == []
    assert not linker.load("r", both)
    assert not linker.offload(both)
    assert not linker.offload(transfer([], []))


def test_models_with_other_caches_are_refused(device: Any) -> None:
    with pytest.raises(kvpool.Unsupported, match="SWA"):
        made(device, components={ComponentType.FULL, ComponentType.SWA})
    with pytest.raises(kvpool.Unsupported, match="SimpleNamespace"):
        made(SimpleNamespace(layer_num=1))
    device.k_scale_buffer = [torch.ones(1)]
    with pytest.raises(kvpool.Unsupported, match="scales"):
        made(device)


def test_keys_and_values_of_different_sizes_are_refused() -> None:
    with pytest.raises(kvpool.Unsupported, match="of one even size"):
        made(mha_device(v_head_dim=8))


def test_wrong_options_are_typed_errors(device: Any) -> None:
    with pytest.raises(kvpool.ArgumentError, match="dram_gb"):
        made(device, dram_gb=1)
    with pytest.raises(kvpool.ArgumentTypeError, match="keep_on_flush"):
        made(device, keep_on_flush=1)
