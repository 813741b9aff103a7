"""KvpoolLinker against SGLang's base class, factory and device memory, without an engine."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_kit import PAGE, indices, key, keys, mha_device, mla_device
from linker_kit import content, load, made, pinned, same, save, scramble, transfer
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache import unified_cache_linker
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

import kvpool
from kvpool.engines.sglang.linker import KvpoolLinker


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
    assert pinned(linker) == 1  # of the latest
    assert len(linker.lookup("long", transfer(keys(0, 8)))) == 8
    assert linker.lookup("new", transfer([key("other")])) == []
    assert pinned(linker) == 0
    assert save(linker, keys(20, 8), list(range(8)))


def test_a_batch_that_begins_ends_the_pins_of_look_ups(linker: Any) -> None:
    save(linker, keys(0, 8), list(range(8)))
    assert len(linker.lookup("r", transfer(keys(0, 8)))) == 8
    assert linker.start_layer_wise_loading() == -1
    assert pinned(linker) == 0


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


def test_a_load_that_has_no_pages_does_not_keep_the_others_from_theirs(device: Any, linker: Any) -> None:
    linker._ranks = 2
    save(linker, keys(0, 2), [0, 1])
    before = [content(device, page) for page in (0, 1, 9)]
    assert linker.load("bad", transfer([key("other")], [9]))
    assert linker.load("good", transfer(keys(0, 2), [10, 11]))
    assert not linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert all(same(content(device, page), wanted) for page, wanted in zip((10, 11, 9), before, strict=True))
    assert pinned(linker) == 0


class Streams:
    """In place of SGLang's module for its device: says what is done with events, and which copies are made."""

    def __init__(self, linker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        done: list[Any] = []
        self.done = done

        class Event:
            def record(self, stream: Any = "current") -> None:
                self.stream = stream
                done.append(("record", stream))

            def synchronize(self) -> None:
                done.append(("wait", self.stream))

        monkeypatch.setattr(unified_cache_linker, "device_module", SimpleNamespace(Event=Event))
        for name in ("save", "load"):
            copy = getattr(linker._store, name)
            monkeypatch.setattr(linker._store, name, lambda *given, name=name, copy=copy: self._copy(name, copy, given))

    def _copy(self, name: str, copy: Any, given: Any) -> Any:
        self.done.append(name)
        return copy(*given)


def test_copies_follow_what_sglangs_streams_had_when_it_asked(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    linker = made(device, stream="forward")
    streams = Streams(linker, monkeypatch)
    asked = [("record", "current"), ("record", "forward")]
    waited = [("wait", "current"), ("wait", "forward")]
    busy = threading.Event()
    linker._saver.submit(busy.wait, 30)
    linker.offload(transfer(keys(0, 2), [0, 1]))
    assert streams.done == asked  # by SGLang's own thread
    busy.set()
    linker._saved[-1].result(30)
    assert streams.done == [*asked, *waited, "save"]
    streams.done.clear()
    busy.clear()
    linker._loader.submit(busy.wait, 30)
    assert linker.load("r", transfer(keys(0, 2), [8, 9]))
    index = linker.start_layer_wise_loading()
    assert streams.done == asked
    busy.set()
    assert linker.finish_layer_wise_loading(index)
    assert streams.done == [*asked, *waited, "load"]
    linker.close()


def test_without_a_stream_of_its_own_the_forward_is_in_the_current_one(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    linker = made(device)
    streams = Streams(linker, monkeypatch)
    assert save(linker, keys(0, 1), [0])
    assert load(linker, keys(0, 1), [8])
    assert streams.done == [("record", "current"), ("wait", "current"), "save",
                            ("record", "current"), ("wait", "current"), "load"]  # fmt: skip
    linker.close()


def test_memory_that_runs_out_is_told_as_a_miss(linker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(names: Any) -> Any:
        raise MemoryError

    save(linker, keys(0, 2), [0, 1])
    monkeypatch.setattr(linker._lookups, "_cache", SimpleNamespace(match=full))
    assert linker.lookup("r", transfer(keys(0, 2))) == []
    assert not linker.load("r", transfer(keys(0, 2), [8, 9]))
    assert linker.start_layer_wise_loading() == -1


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


SCALES = ["k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "native_v_scale_buffer"]


@pytest.mark.parametrize("scales", SCALES)
def test_scales_beside_the_cache_are_refused(device: Any, scales: str) -> None:
    assert getattr(device, scales) is None  # it is SGLang's name
    setattr(device, scales, [torch.ones(1)])
    with pytest.raises(kvpool.Unsupported, match="scales"):
        made(device)


def test_quantized_caches_are_refused(device: Any) -> None:
    assert not device.is_quantized_kv_cache
    device.quant_method = object()  # not UnquantizedKVCacheMethod
    with pytest.raises(kvpool.Unsupported, match="scales"):
        made(device)


@pytest.mark.parametrize("make", [mha_device, mla_device])
def test_pages_of_which_a_rank_holds_some_tokens_are_refused(make: Any) -> None:
    with pytest.raises(kvpool.Unsupported, match="dcp-size"):
        made(make(), sglang={"page_size": 2 * PAGE})


def test_pipeline_stages_are_refused(device: Any) -> None:
    with pytest.raises(kvpool.Unsupported, match="2 pipeline stages"):
        made(device, sglang={"pp_size": 2})


def test_keys_and_values_of_different_sizes_are_refused() -> None:
    with pytest.raises(kvpool.Unsupported, match="of one even size"):
        made(mha_device(v_head_dim=8))


def test_wrong_options_are_typed_errors(device: Any) -> None:
    with pytest.raises(kvpool.ArgumentError, match="dram_gb"):
        made(device, dram_gb=1)
    with pytest.raises(kvpool.ArgumentTypeError, match="keep_on_flush"):
        made(device, keep_on_flush=1)
