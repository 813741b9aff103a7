"""What the connector's pools do before vLLM unmaps its blocks, and when they are mapped again."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engines.vllm_apart_kit import ApartEngine
from engines.vllm_kit import Engine, Request, prompt
from engines.vllm_members_kit import TO

import kvpool
from kvpool.engines.vllm import engine_pool


def sleep(engine) -> None:
    """As vLLM does: the scheduler has dropped what is cached, and each worker gives up its blocks."""
    assert engine.planner.reset()
    for worker in getattr(engine, "workers", [engine.engine]):
        worker.suspend()
        worker.suspend()  # vLLM may release the blocks first, and sleep then


def wake(engine) -> None:
    for worker in getattr(engine, "workers", [engine.engine]):
        worker.resume()
        worker.resume()
    for layers in engine.memories:
        for tensor in layers:
            tensor[:] = np.nan


@pytest.fixture(params=[Engine, ApartEngine], ids=["one process", "two workers"])
def engine(request):
    engine = request.param()
    yield engine
    engine.close()


def test_an_engine_that_has_slept_caches_and_loads_as_before(engine):
    engine.run(Request("a", prompt(20)))
    before = [worker._addrs.copy() for worker in getattr(engine, "workers", [engine.engine])]
    sleep(engine)
    with pytest.raises(kvpool.Suspended):
        getattr(engine, "workers", [engine.engine])[0].pool.adopt([1])
    wake(engine)
    for worker, old in zip(getattr(engine, "workers", [engine.engine]), before, strict=True):
        assert not set(worker._addrs.tolist()) & set(old.tolist())  # nothing from before can be taken for these
    assert engine.run(Request("b", prompt(20))) == 0
    engine.pool.finish_all()
    assert engine.run(Request("c", prompt(20))) == 16


def test_it_waits_for_saves_and_loads_that_are_under_way():
    engine = Engine()
    request = engine.start(Request("a", prompt(20)))
    assert engine.admit(request)
    engine.step({"a": 20})
    assert engine.engine.saving
    engine.engine.suspend()
    assert not engine.engine.saving
    engine.engine.resume()
    engine.finish(request)
    engine.close()


def test_it_waits_for_a_reader_and_gives_up_with_all_as_before(monkeypatch):
    engine = Engine(held=False)
    worker = engine.engine
    held = worker.pool.sequence(worker._addrs[1:2])
    monkeypatch.setattr(engine_pool, "_SUSPEND_SECONDS", 0.05)
    with pytest.raises(kvpool.StateError, match="reads the block"):
        worker.suspend()
    assert not worker.pool.suspended
    assert engine.run(Request("a", prompt(20))) == 0
    monkeypatch.setattr(engine_pool, "_SUSPEND_SECONDS", 60)
    threading.Timer(0.1, held.close).start()
    worker.suspend()
    assert worker.pool.suspended
    worker.close()


def test_sends_go_on_after_a_sleep_from_the_blocks_of_now(pair):
    prefill, decode = pair
    prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
    sleep(prefill)
    wake(prefill)
    told = prefill.prefill(Request("b", prompt(18, seed=1), kv_transfer_params=TO))
    assert decode.decode(Request("c", prompt(18, seed=1), kv_transfer_params=told)) == 16
