"""What all loads and saves of a `Storage` have in common."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Literal

from kvpool.pool import Pool
from kvpool.storage.budget import Breaker, ByteBudget
from kvpool.storage.counting import Seldom
from kvpool.storage.keys import ContentKeys
from kvpool.storage.memory import BlockMemory
from kvpool.storage.stats import Counters
from kvpool.storage.store import Store
from kvpool.storage.workers import Alarm, ReadsFirst, Workers

__all__ = ["Shared"]

_log = logging.getLogger("kvpool.storage")


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
        self._seldom = {"loading": Seldom(), "saving": Seldom(), "the admission policy": Seldom()}

    def failed(
        self, what: Literal["loading", "saving", "the admission policy"], error: object, switched_off: bool = False
    ) -> None:
        """A call of the store, or of the policy, has failed.

        Args:
            what: The call was for, or of.
            error: Why.
            switched_off: Whether the store is left alone from now on, for a while.
        """
        if failures := self._seldom[what].due(at_once=switched_off):
            _log.warning(
                "%s has failed %d times: %s%s", what, failures, error,
                "; it is switched off for a while" if switched_off else "",
                extra={"what": what, "failures": failures},
            )  # fmt: skip
