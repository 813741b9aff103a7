"""Sleep mode on a CPU, where vLLM has none: what its allocator does to a GPU's blocks is done to the host's.

While the engine sleeps nobody may touch the pages of its blocks: a read or a write ends the process. When it wakes they
have other content. Everything else is vLLM's: the pause, the resets, the dispatch to the backend in each worker.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

import torch
from inside import only_engine

import kvpool
from kvpool.engines.vllm import engine_pool

_protect = ctypes.CDLL(None, use_errno=True).mprotect
_tensors: list[torch.Tensor] = []
_held: list[kvpool.KVSequence] = []
counts = {"slept": 0, "woken": 0}


def _each_page_of_the_blocks(protection: int) -> None:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors}
    assert storages
    for storage in storages.values():
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        assert _protect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), protection) == 0


def install(worker) -> dict:
    """Gives this worker a sleep mode."""
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    layers = worker.compilation_config.static_forward_context
    _tensors[:] = [layers[name].kv_cache for name in only_engine_layers(worker)]

    def suspend(self, level=1):
        _each_page_of_the_blocks(0)
        counts["slept"] += 1

    def resume(self, tags=None):
        if tags is None or "kv_cache" in tags:
            _each_page_of_the_blocks(mmap.PROT_READ | mmap.PROT_WRITE)
            for tensor in _tensors:
                tensor.fill_(7.0)
        counts["woken"] += 1

    CuMemBackend.suspend, CuMemBackend.resume = suspend, resume
    CuMemBackend.discard = lambda self, tags: suspend(self)
    CPUWorker.sleep = lambda self, level=1: self.sleep_mode_backend.suspend(level)
    CPUWorker.wake_up = lambda self, tags=None: self.sleep_mode_backend.resume(tags)
    CPUWorker.discard = Worker.discard
    return {"backend": SleepModeBackendFactory.get_backend_class("cumem").__name__}


def only_engine_layers(worker) -> tuple[str, ...]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._pages.layers


def asleep(worker) -> dict:
    return {"suspended": only_engine().pool.suspended, **counts}


def hold_a_block(worker, seconds: float | None, patience: float) -> None:
    """As a peer's transfer does that takes so long, or until `let_go`; and a sleep waits for it so long."""
    engine = only_engine()
    engine_pool._SUSPEND_SECONDS = patience
    _held.append(engine.pool.sequence(engine._addrs[1:2]))
    if seconds is not None:
        threading.Timer(seconds, _held[-1].close).start()


def let_go(worker, patience: float) -> None:
    """Of what is held; and a sleep waits so long again."""
    engine_pool._SUSPEND_SECONDS = patience
    while _held:
        _held.pop().close()
