"""vLLM's sleep mode: before it unmaps its blocks the pools over them are suspended, and resumed when they are back.

vLLM has no call for connectors at a sleep. What it calls is a backend of its sleep mode, in the process of each worker,
after the scheduler has dropped what is cached (`reset_cache`). So the class of the backend is replaced by one that
tells the pools first, whichever backend it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

from kvpool.errors import Unsupported

__all__ = ["follow"]

_KV_CACHE = "kv_cache"  # vLLM's tag of its blocks


class _Sleeper(Protocol):
    def suspend(self) -> bool: ...  # whether it was awake before
    def resume(self) -> None: ...


_sleepers: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process, as vLLM's allocator is one for the process


def follow(backend: str, engine: _Sleeper, routes: tuple[str, ...]) -> None:
    """From now on the engine sleeps when vLLM does.

    Args:
        backend: vLLM's ``sleep_mode_backend``.
        engine: Is suspended before vLLM's blocks are unmapped, and resumed when they are mapped again.
        routes: Of its pool.

    Raises:
        Unsupported: The route ucx keeps writing to memory that was unmapped.
    """
    if "ucx" in routes:
        raise Unsupported(
            "sleep mode does not work with the route ucx: network adapters keep writing to memory that vLLM has "
            "unmapped. Leave ucx out of KVPOOL_ROUTES, or sleep mode off"
        )
    _sleepers.add(engine)
    original = SleepModeBackendFactory.get_backend_class(backend)
    if not issubclass(original, _TellsPools):
        telling = type(f"Kvpool{original.__name__}", (_TellsPools, original), {})
        SleepModeBackendFactory._registry[backend] = lambda: telling


class _TellsPools(SleepModeBackend):  # type: ignore[misc]
    """Goes before a backend in the order of classes."""

    def suspend(self, level: int = 1) -> None:
        with _asleep():
            super().suspend(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        with _asleep() if _KV_CACHE in tags else nullcontext():
            super().discard(tags)

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        if not tags or _KV_CACHE in tags:
            for sleeper in list(_sleepers):
                sleeper.resume()


@contextmanager
def _asleep() -> Iterator[None]:
    """Suspends all for good if the body, which unmaps the blocks, ends well. Otherwise those sleep that slept before.

    VLLM unmaps nothing if one of them raises. It does not wake a worker whose backend has failed.
    """
    suspended = []
    try:
        for sleeper in list(_sleepers):
            if sleeper.suspend():
                suspended.append(sleeper)
        yield
    except BaseException:
        for sleeper in suspended:
            sleeper.resume()
        raise
