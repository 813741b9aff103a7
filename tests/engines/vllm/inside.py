"""What the tests do in the process of vLLM's worker: `collective_rpc` calls these with the worker."""

from __future__ import annotations

import dataclasses
import os
import time

import numpy as np

import kvpool
from kvpool.engines.vllm import engine_pool


def only_engine() -> engine_pool.EnginePool:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker()


def await_saves(worker) -> dict:
    """All saves have ended; the pool's own check passes."""
    engine = only_engine()
    engine.await_saves_of(None)
    pool = getattr(engine.pool, "wrapped", engine.pool)
    pool.audit()
    stats = pool.stats()
    return {"cached": stats.dram.historical, "capacity": stats.dram.capacity, "layout": repr(pool.kv_layout)}


def poison(worker) -> int:
    """Changes what the cache holds, and nothing else."""
    pool = only_engine().pool
    memory = pool.tensor(kvpool.DRAM).numpy()
    flat = memory.view(np.uint8).reshape(-1)
    np.bitwise_xor(flat, 0x15, out=flat)
    return len(flat)


def fingerprint(worker) -> str:
    return only_engine().pool.settings.model


class FailingCopy:
    """A load that fails after some looks at it."""

    def __init__(self, looks: int):
        self._looks = looks

    def done(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def exception(self, timeout=None):
        return kvpool.DeviceLost("the test says so")


class FailingPool:
    """A pool whose next loads fail: "now", by an exception, or "later"."""

    def __init__(self, pool: kvpool.Pool, failures: list[str]):
        self.wrapped = pool
        self.failures = failures

    def __getattr__(self, name):
        return getattr(self.wrapped, name)

    def load(self, addrs, into, **options):
        if not self.failures:
            return self.wrapped.load(addrs, into, **options)
        if self.failures.pop(0) == "now" or options["wait"]:
            raise kvpool.DeviceLost("the test says so")
        return FailingCopy(looks=5)


def fail_loads(worker, failures: list[str]) -> None:
    engine = only_engine()
    engine.pool = FailingPool(getattr(engine.pool, "wrapped", engine.pool), failures)


def failures_left(worker) -> int:
    return len(only_engine().pool.failures)


def rank(worker) -> dict | None:
    """The rank of the scheduler's pool that this worker is."""
    joined = getattr(only_engine(), "_rank", None)
    return None if joined is None else {"rank": joined.rank, "lost": joined.lost is not None}


def is_last() -> bool:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().is_last_rank


def poison_last(worker) -> None:
    if is_last():
        poison(worker)


def fail_loads_of_last(worker, failures: list[str]) -> None:
    if is_last():
        fail_loads(worker, failures)


def await_sends(worker) -> int:
    """All sends have ended in their own time. Returns how many blocks were ever sent."""
    engine = only_engine()
    until = time.monotonic() + 30
    while engine._sends.busy:
        assert time.monotonic() < until
        time.sleep(0.001)
    totals = engine.pool.peers.totals().get("send")
    return totals.bytes // engine.pool.kv_layout.block_bytes if totals else 0


def send_by_layer(worker, by_layer: bool) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    connector._options = dataclasses.replace(connector._options, by_layer=by_layer)


def layers_sent_early(worker) -> int:
    """How many layers were sent before the last one was computed, since the first call."""
    sends = only_engine()._sends
    if not hasattr(sends, "early"):
        sends.early = 0
        send_computed = sends._send_computed

        def counting(layers):
            before = layers.sent
            send_computed(layers)
            if len(layers.computed) < sends._layers:
                sends.early += layers.sent - before

        sends._send_computed = counting
    return sends.early


def stall_sends(worker) -> None:
    """Sends begin, and do not end."""
    sends = only_engine()._sends

    def begin_only(plan):
        from kvpool.engines.vllm.sends import _Layers

        layers = _Layers()
        sends._begin_layers(plan, layers)
        layers.computed = [0]
        sends._send_computed(layers)

    sends._send_whole = begin_only


def process_id(worker) -> int:
    return os.getpid()


class EndlessCopy:
    """A save that does not end."""

    def done(self) -> bool:
        return False

    def exception(self, timeout=None):
        raise kvpool.DeadlineExceeded("the test says so")


def hold_saves(worker) -> None:
    """Saves begin, and do not end."""
    only_engine()._copy_out = lambda plan: EndlessCopy()


def memory_of_blocks(worker) -> list[str]:
    """The names of the mappings that vLLM's blocks lie in."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    layers = worker.compilation_config.static_forward_context
    places = [layers[name].kv_cache.data_ptr() for name in get_kv_transfer_group()._pages.layers]
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    spans = [([int(part, 16) for part in line[0].split("-")], line[5] if len(line) > 5 else "") for line in lines]
    return sorted({name.strip() for (begin, end), name in spans for at in places if begin <= at < end})
