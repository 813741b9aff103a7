"""vLLM's sleep mode: before it unmaps its blocks the pools over them are suspended, and resumed when they are back.

vLLM has no call for connectors at a sleep. What it calls is a backend of its sleep mode, in the process of each worker,
after the scheduler has dropped what is cached (`reset_cache`). So the class of the backend is replaced by one that
tells the pools first, whichever backend it is.
"""

from __future__ import annotations

from contextlib import nullcontext

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

from kvpool.engines.sleep import Sleeper, Sleepers, check_routes

__all__ = ["follow"]

_KV_CACHE = "kv_cache"  # vLLM's tag of its blocks

_sleepers = Sleepers()


def follow(backend: str, engine: Sleeper, routes: tuple[str, ...]) -> None:
    """From now on the engine sleeps when vLLM does.

    Args:
        backend: vLLM's ``sleep_mode_backend``.
        engine: Is suspended before vLLM's blocks are unmapped, and resumed when they are mapped again.
        routes: Of its pool.

    Raises:
        Unsupported: The route ucx keeps writing to memory that was unmapped.
    """
    check_routes(routes, "sleep mode", "vLLM")
    _sleepers.add(engine)
    original = SleepModeBackendFactory.get_backend_class(backend)
    if not issubclass(original, _TellsPools):
        telling = type(f"Kvpool{original.__name__}", (_TellsPools, original), {})
        SleepModeBackendFactory._registry[backend] = lambda: telling


class _TellsPools(SleepModeBackend):  # type: ignore[misc]
    """Goes before a backend in the order of classes.

    If unmapping fails the pools are resumed at once: vLLM does not wake a worker whose backend has failed.
    """

    def suspend(self, level: int = 1) -> None:
        with _sleepers.asleep():
            super().suspend(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        with _sleepers.asleep() if _KV_CACHE in tags else nullcontext():
            super().discard(tags)

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        if not tags or _KV_CACHE in tags:
            _sleepers.resume()
