"""In which order pools and vLLM's blocks go to sleep and wake, with a stand-in for vLLM's module."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import ClassVar

import pytest

import kvpool

NAME = "kvpool.engines.vllm.sleeping"


@pytest.fixture
def backend(monkeypatch):
    """vLLM's backend, which notes its calls in `calls`, with one pool that follows it."""
    calls: list[str] = []

    class SleepModeBackend:
        pass

    class Backend(SleepModeBackend):
        def suspend(self, level=1):
            calls.append("unmap")

        def discard(self, tags):
            calls.append("unmap")

        def resume(self, tags=None):
            calls.append("map")

    class Factory:
        _registry: ClassVar[dict] = {"cumem": lambda: Backend}

        @classmethod
        def get_backend_class(cls, name):
            return cls._registry[name]()

    class Sleeper:
        def suspend(self):
            calls.append("suspend")
            return True

        def resume(self):
            calls.append("resume")

    stub = ModuleType("vllm.device_allocator.sleep_mode_backend")
    stub.SleepModeBackend, stub.SleepModeBackendFactory = SleepModeBackend, Factory
    for name in ("vllm", "vllm.device_allocator"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    sleeping = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)
    with pytest.raises(kvpool.Unsupported, match="ucx"):
        sleeping.follow("cumem", Sleeper(), ("ucx", "sock"))
    pool = Sleeper()  # which `sleeping` refers to weakly
    sleeping.follow("cumem", pool, ("cma", "sock"))
    return Factory.get_backend_class("cumem")(), calls, pool


def test_pools_are_suspended_before_the_blocks_are_unmapped_and_resumed_when_they_are_mapped(backend):
    vllm, calls, _ = backend
    vllm.suspend(1)
    vllm.resume()
    assert calls == ["suspend", "unmap", "map", "resume"]


def test_pools_are_told_of_what_befalls_the_blocks_alone(backend):
    vllm, calls, _ = backend
    vllm.discard(("kv_cache",))
    vllm.resume(["weights"])
    vllm.resume(["kv_cache"])
    vllm.discard(("weights",))
    assert calls == ["suspend", "unmap", "map", "map", "resume", "unmap"]
