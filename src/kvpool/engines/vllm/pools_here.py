"""Which engine of this process has which pool: the sides of a connector find each other by the engine's id.

Any thread may call.
"""

from __future__ import annotations

import threading

from kvpool.engines.vllm.engine_pool import EnginePool

__all__ = ["attach", "detach", "find"]

_pools: dict[str, EnginePool] = {}
_lock = threading.Lock()


def attach(engine_id: str, engine: EnginePool) -> None:
    """Makes an engine's pool known in this process. One of an engine that was not shut down is closed."""
    with _lock:
        previous = _pools.get(engine_id)
        _pools[engine_id] = engine
    if previous is not None:
        previous.close()


def find(engine_id: str) -> EnginePool | None:
    """The pool of an engine of this process."""
    with _lock:
        return _pools.get(engine_id)


def detach(engine_id: str) -> None:
    """Closes an engine's pool, if it has one."""
    with _lock:
        engine = _pools.pop(engine_id, None)
    if engine is not None:
        engine.close()
