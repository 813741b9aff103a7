"""KvpoolLinker while SGLang sleeps: its memory saver pauses and resumes the pages."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from host_kit import keys, mha_device
from linker_kit import content, made, same, scramble, transfer

import kvpool


class FakeSaver:
    """torch_memory_saver's part: what is paused cannot be told from garbage."""

    enabled = True

    def __init__(self, device: Any, linker: Any) -> None:
        self._device, self._linker = device, linker
        self.saved_at_pause: int | None = None

    def pause(self, tag: str) -> None:
        if tag == "kv_cache":
            self.saved_at_pause = self._linker.num_completed_offloads()
            scramble(self._device, 99)

    def resume(self, tag: str) -> None:
        pass


@pytest.fixture
def adapter_of(monkeypatch):
    from sglang.srt.utils import torch_memory_saver_adapter

    def adapter(device: Any, linker: Any) -> tuple[Any, FakeSaver]:
        saver = FakeSaver(device, linker)
        monkeypatch.setattr(torch_memory_saver_adapter, "_memory_saver", saver, raising=False)
        return torch_memory_saver_adapter._TorchMemorySaverAdapterReal(), saver

    return adapter


def test_pages_are_unmapped_when_the_saves_that_read_them_have_ended(adapter_of):
    """SGLang's scheduler is idle by then, but what a linker still saves it does not ask."""
    device = mha_device()
    linker = made(device, keep_on_flush=True)
    adapter, saver = adapter_of(device, linker)
    scramble(device, 1)
    before = content(device, 2)
    free = threading.Event()
    linker._saver.submit(free.wait)  # the save waits for its turn
    assert linker.offload(transfer(keys(1, 1), [2]))
    threading.Timer(0.2, free.set).start()
    adapter.pause("kv_cache")
    assert saver.saved_at_pause == 1
    assert linker._store.pool.suspended
    linker.reset()  # SGLang flushes its cache now
    adapter.resume("weights")
    assert linker._store.pool.suspended
    adapter.resume("kv_cache")
    assert not linker._store.pool.suspended
    assert linker.lookup("r", transfer(keys(1, 1))) == [1]
    assert linker.load("r", transfer(keys(1, 1), [3]))
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert same(content(device, 3), before)
    linker.close()


def test_weights_alone_are_no_reason_to_wait(adapter_of):
    device = mha_device()
    linker = made(device)
    adapter, _ = adapter_of(device, linker)
    adapter.pause("weights")
    assert not linker._store.pool.suspended
    linker.close()


def test_what_was_suspended_for_a_sleep_that_fails_is_resumed(adapter_of, monkeypatch):
    """One linker cannot be suspended, or SGLang's own pause fails. One that slept before sleeps on."""
    device = mha_device()
    linkers = [made(device, keep_on_flush=True) for _ in range(3)]
    adapter, saver = adapter_of(device, linkers[0])
    linkers[2].suspend()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(linkers[1]._store.pool, "suspend", lambda **how: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adapter.pause("kv_cache")
    assert [linker._store.pool.suspended for linker in linkers] == [False, False, True]
    assert saver.saved_at_pause is None  # SGLang has paused nothing
    monkeypatch.setattr(saver, "pause", lambda tag: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        adapter.pause("kv_cache")
    assert [linker._store.pool.suspended for linker in linkers] == [False, False, True]
    assert linkers[0].offload(transfer(keys(1, 1), [2]))  # its pages are adopted again
    linkers[0]._await_copies()
    assert linkers[0].pop_completed_offload()
    for linker in linkers:
        linker.close()


def test_the_memory_saver_and_network_adapters_are_refused_together(monkeypatch):
    monkeypatch.setenv("KVPOOL_ROUTES", "ucx,sock")
    with pytest.raises(kvpool.Unsupported, match="ucx"):
        made(mha_device(), server_args=SimpleNamespace(enable_memory_saver=True))
    made(mha_device(), server_args=SimpleNamespace(enable_memory_saver=False)).close()
