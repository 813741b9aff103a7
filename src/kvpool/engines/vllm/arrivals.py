"""The prompts that other engines have sent, until a request uses them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpool import _core
from kvpool.engines.vllm.params import parts, read_letter
from kvpool.pool import Pool

__all__ = ["Arrivals"]


@dataclass
class _Arrival:
    item: _core.Received | None  # None: let go, or it failed
    blocks: int
    until: float
    complete: bool | None  # None: it was let go before it came


class Arrivals:
    """What has arrived, by its id. Any thread may call.

    Of a model with several groups of layers a prompt arrives in parts, one for each, and is there when all are.
    A thread of the pool enters what arrives, also while the engine has nothing to do. An arrival pins its blocks, so
    that they are still there when its request comes. A request may never come: so a pin ends after a time, and all of
    them together hold at most half of the cache; the oldest ends first. The blocks stay cached without it.
    """

    def __init__(self, pool: Pool, keep_s: float, groups: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """Of the pool's inbox.

        Args:
            pool: A member of a cluster.
            keep_s: Seconds for which an arrival is remembered.
            groups: Of layers.
            clock: Seconds.
        """
        self._groups = groups
        self._keep_s = keep_s
        self._clock = clock
        self._pinned_max = pool.stats().dram.capacity // 2
        self._lock = threading.Lock()
        self._pinned = 0
        self._arrivals: dict[str, _Arrival] = {}  # the oldest first
        self._callback = pool.inbox.on_received(self._enter)

    def came(self, number: str) -> bool:
        """Whether the prompt of this id has arrived, lately enough to be remembered."""
        with self._lock:
            self._end_pins()
            found = [self._arrivals.get(part) for part in parts(number, self._groups)]
            return all(arrival is not None and arrival.complete for arrival in found)

    def failed(self, number: str) -> bool:
        """Whether its sender has said, lately, that the prompt of this id, or a part of it, does not come."""
        with self._lock:
            found = [self._arrivals.get(part) for part in parts(number, self._groups)]
            return any(arrival is not None and arrival.complete is False for arrival in found)

    def let_go(self, number: str) -> None:
        """Its request needs no pin any more. What has not come yet will not be pinned."""
        with self._lock:
            for part in parts(number, self._groups):
                arrival = self._arrivals.get(part)
                if arrival is not None:
                    self._unpin(arrival)
                else:
                    self._arrivals[part] = _Arrival(None, 0, self._clock() + self._keep_s, None)

    def end_pins(self) -> None:
        """Ends the pins that are too old. Call it at each step: else they last until something arrives."""
        with self._lock:
            self._end_pins()

    def clear(self) -> None:
        """Ends all pins and forgets all arrivals."""
        with self._lock:
            for arrival in self._arrivals.values():
                self._unpin(arrival)
            self._arrivals.clear()

    def close(self) -> None:
        """Takes no more, and ends all pins."""
        self._callback.close()
        self.clear()

    # ----

    def _enter(self, item: _core.Received) -> None:
        number, complete = read_letter(item.private)
        complete = complete and item.inserted
        if not complete:
            item.close()
        with self._lock:
            known = self._arrivals.get(number)
            if not number or known is not None:
                if known is not None and known.complete is None:
                    known.complete = complete
                item.close()
                return
            until = self._clock() + self._keep_s
            if complete:
                self._pinned += len(item.addrs)
                self._arrivals[number] = _Arrival(item, len(item.addrs), until, True)
            else:
                self._arrivals[number] = _Arrival(None, 0, until, False)
            self._end_pins()

    def _end_pins(self) -> None:
        """Forgets what is too old, and unpins what is too much."""
        now = self._clock()
        while self._arrivals:
            number, oldest = next(iter(self._arrivals.items()))
            if oldest.until > now:
                break
            self._unpin(oldest)
            del self._arrivals[number]
        for arrival in self._arrivals.values():
            if self._pinned <= self._pinned_max:
                break
            self._unpin(arrival)

    def _unpin(self, arrival: _Arrival) -> None:
        if arrival.item is not None:
            arrival.item.close()
            arrival.item = None
            self._pinned -= arrival.blocks
