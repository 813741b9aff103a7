"""What happens to the pools of a worker when a sleep of vLLM's fails: vLLM wakes nothing then."""

from __future__ import annotations

import pytest
from sleeper_kit import Sleeper
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

import kvpool
from kvpool.engines.vllm import sleeping


class Backend(SleepModeBackend):
    fails = False

    def suspend(self, level: int = 1) -> None:
        self.unmap()

    def resume(self, tags: list[str] | None = None) -> None:
        pass

    def discard(self, tags: tuple[str, ...]) -> None:
        self.unmap()

    def unmap(self) -> None:
        if self.fails:
            raise RuntimeError("cannot be unmapped")


class Basic(Backend):
    discard = SleepModeBackend.discard  # which raises always


@pytest.fixture
def sleepers(monkeypatch):
    """Three in a known order, of which the first one sleeps already."""
    monkeypatch.setattr(sleeping._sleepers, "_all", ordered := Ordered())
    monkeypatch.setattr(SleepModeBackendFactory, "_registry", dict(SleepModeBackendFactory._registry))
    made = [Sleeper() for _ in range(3)]
    for name, backend in (("whole", Backend), ("basic", Basic)):
        SleepModeBackendFactory._registry[name] = lambda backend=backend: backend
        for sleeper in made:
            sleeping.follow(name, sleeper, ("cma", "sock"))
    assert list(ordered) == made
    made[0].suspend()
    return made


class Ordered(dict):
    def add(self, sleeper: Sleeper) -> None:
        self[sleeper] = None


def backend_of(name: str):
    return SleepModeBackendFactory.get_backend_class(name)()


def asleep(sleepers: list[Sleeper]) -> list[bool]:
    return [sleeper.asleep for sleeper in sleepers]


@pytest.mark.parametrize("how", ["suspend", "discard"])
def test_pools_are_resumed_if_the_backend_fails(sleepers, how):
    backend = backend_of("whole")
    backend.fails = True
    argument = 1 if how == "suspend" else ("kv_cache",)
    with pytest.raises(RuntimeError, match="cannot be unmapped"):
        getattr(backend, how)(argument)
    assert asleep(sleepers) == [True, False, False]
    backend.fails = False
    getattr(backend, how)(argument)
    assert asleep(sleepers) == [True, True, True]


def test_pools_are_resumed_if_the_backend_has_no_discard(sleepers):
    with pytest.raises(RuntimeError, match="selective discard"):
        backend_of("basic").discard(("kv_cache",))
    assert asleep(sleepers) == [True, False, False]


def test_a_pool_that_cannot_be_suspended_keeps_the_others_as_they_were(sleepers):
    sleepers[2].fails = True
    backend = backend_of("whole")
    with pytest.raises(kvpool.Busy):
        backend.suspend(1)
    assert asleep(sleepers) == [True, False, False]
    assert [sleeper.resumed for sleeper in sleepers] == [0, 1, 0]


def test_other_memory_can_be_discarded_with_the_pools_awake(sleepers):
    backend_of("whole").discard(("weights",))
    assert asleep(sleepers) == [True, False, False]
