"""What all loads and saves of a `Storage` have in common."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final

from kvpool.pool import Pool
from kvpool.storage.budget import Breaker, ByteBudget
from kvpool.storage.keys import ContentKeys
from kvpool.storage.memory import BlockMemory
from kvpool.storage.stats import Counters
from kvpool.storage.store import Store
from kvpool.storage.workers import Alarm, ReadsFirst, Workers

__all__ = ["Shared"]

_log = logging.getLogger("kvpool.storage")

_LOG_EVERY_S: Final = 30.0


@dataclass(frozen=True)
class Shared:
    """The parts of a Storage. All of them are thread-safe."""

    pool: Pool
    store: Store
    keys: ContentKeys
    memory: BlockMemory
    counters: Counters
    readers: Workers
    writers: Workers
    alarm: Alarm
    reads_first: ReadsFirst
    budget: ByteBudget
    reading: Breaker
    writing: Breaker
    warnings: Warnings
    store_timeout_s: float
    closing: threading.Event


class Warnings:
    """Says once in a while that the store fails. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def failed(self, what: str, error: object, switched_off: bool) -> None:
        """A call of the store has failed.

        Args:
            what: "loading" or "saving".
            error: Why.
            switched_off: Whether it is left alone from now on, for a while.
        """
        with self._lock:
            self._silent[what] = self._silent.get(what, 0) + 1
            now = time.monotonic()
            if now < self._next.get(what, 0.0) and not switched_off:
                return
            self._next[what] = now + _LOG_EVERY_S
            failures, self._silent[what] = self._silent[what], 0
        _log.warning(
            "%s has failed %d times: %s%s", what, failures, error,
            "; it is switched off for a while" if switched_off else "",
            extra={"what": what, "failures": failures},
        )  # fmt: skip
