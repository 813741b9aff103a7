"""What tests of live migration do to a pool, in whatever process: keep it full of prompts, and hold up its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from control.migration_kit import ToyEngine
from kit import BLOCK, prompt, store
from transfer.kit import eventually

import kvpool

__all__ = ["Evicting", "hold_behind", "stop_within_a_block"]

_BLOCKS = 6  # of a prompt
_PAUSE_S = 0.002


class Evicting:
    """From `begin` to `end` a pool has no free blocks: prompts are cached one after another, each evicts earlier ones.

    So all room that a request gets is taken from a prompt. `end` before `begin` does nothing.
    """

    def __init__(self, pool: kvpool.Pool) -> None:
        self._pool = pool
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: self._pool.stats().hbm.free < _BLOCKS)

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(_PAUSE_S):
            number += 1
            try:
                store(self._pool, prompt(_BLOCKS, number), evict=True)
            except kvpool.OutOfBlocks:  # requests have all of the room just now
                continue
            except kvpool.ClosedError:
                return


def hold_behind(owner: Any, verb: str, hold: Callable[[], object], **only: Any) -> None:
    """The next call of a migration with these arguments is held up when it has begun what it does."""
    call = getattr(owner, verb)

    def held(*args: Any, **named: Any) -> Any:
        found = call(*args, **named)
        if threading.current_thread().name == "kvpool-migration" and only.items() <= named.items():
            delattr(owner, verb)
            hold()
        return found

    setattr(owner, verb, held)


def stop_within_a_block(engine: ToyEngine) -> None:
    """When a request is stopped, a part of a block is left to fetch: no round has sent it, whatever came before."""

    def hook(request: str) -> None:
        engine.end()
        while engine.requests[request].whole % BLOCK == 0:
            engine.step(request)

    engine.before["stop"] = hook
