"""kvpool's two sides of small transfers: one block of 4 KiB, with an item or inserted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import kvpool
from bench.measure import no_collections
from bench.transfer.own import listen, settings
from bench.workload import BLOCK_TOKENS, random_tokens

_BLOCK_BYTES = 4096
_BLOCKS = 16384  # more than the prompts that are ever inserted, so that nothing is evicted
_LISTEN_S = 20.0
_SLEEP_S_MIN = 1e-3  # shorter pauses are spun
_ECHO, _STAMP, _END = b"e", b"s", b"q"


class Subject:
    """See bench/remote.py. Sender and receiver."""

    def start(self, routes: list[str]) -> int:
        """Makes a pool, and returns the number of its process."""
        layout = kvpool.RawLayout(block_bytes=_BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
        self._pool = kvpool.Pool(layout, hbm_blocks=_BLOCKS, **settings(*routes))
        self._prompts = 0
        self._one_way_us: list[float] = []
        return os.getpid()

    def listen(self, link: str) -> str:
        return listen(self._pool, link)

    def connect(self, address: str) -> dict[str, Any]:
        self._peer = self._pool.peers.connect(address)
        self._block = self._pool.alloc(1)
        self._lent = self._pool.alloc(1, instance=self._peer)
        peer = self._pool.peers.list()[0]
        return {"link": peer.link, "routes": peer.routes}

    # ---- the receiving application

    def attend(self) -> None:
        """A thread takes what arrives, notes how old its stamp is, and sends back what asks for it."""
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def one_way_us(self, n: int) -> list[float]:
        """How old the next n stamps were when they arrived; the machine has one monotonic clock."""
        end = time.monotonic() + _LISTEN_S
        while len(self._one_way_us) < n and time.monotonic() < end:
            time.sleep(0.001)
        times, self._one_way_us = self._one_way_us[:n], self._one_way_us[n:]
        if len(times) < n:
            raise RuntimeError(f"{len(times)} of {n} notifications arrived")
        return times

    def _take(self) -> None:
        reply = self._pool.alloc(1)
        while True:
            item = self._pool.inbox.receive(timeout=_LISTEN_S)
            now = perf_counter_ns()
            if item is None:
                continue
            with item:
                kind, stamp = item.private[:1], item.private[1:]
                self._one_way_us.append((now - int.from_bytes(stamp, "little")) / 1000)
                if kind == _ECHO:
                    self._pool.transfer(item.peer, reply, private=_stamped(_STAMP)).wait()
                elif kind == _END:
                    return

    # ---- the sender

    def named(self, n: int, pause_s: float) -> list[float]:
        """Into a block that was lent before."""
        pool, peer, block, lent = self._pool, self._peer, self._block, self._lent
        return _timed(lambda: pool.transfer(peer, block, to=lent).wait(), n, pause_s)

    def insert(self, n: int, pause_s: float) -> list[float]:
        """A prompt that the receiver does not have: reservation, write, insertion, acknowledgement."""
        pool, peer, block = self._pool, self._peer, self._block
        first, self._prompts = self._prompts, self._prompts + n + 1
        prompts = iter([random_tokens(first + number, BLOCK_TOKENS) for number in range(n + 1)])
        return _timed(lambda: pool.transfer_with_insert(peer, next(prompts), block).wait(), n, pause_s)

    def notify(self, n: int, pause_s: float) -> list[float]:
        """A block, and a word to the application: until wait() returns here."""
        pool, peer, block = self._pool, self._peer, self._block
        return _timed(lambda: pool.transfer(peer, block, private=_stamped(_STAMP)).wait(), n, pause_s)

    def echo(self, n: int) -> list[float]:
        """A block and a word there and back, half of it: from the call to what received() returns here."""

        def there_and_back() -> None:
            self._pool.transfer(self._peer, self._block, private=_stamped(_ECHO)).wait()
            item = self._pool.inbox.receive(timeout=_LISTEN_S)
            if item is None:
                raise RuntimeError("no answer")
            item.close()

        return [time_us / 2 for time_us in _timed(there_and_back, n, 0.0)]

    def end_attention(self) -> None:
        self._pool.transfer(self._peer, self._block, private=_stamped(_END)).wait()


def _stamped(kind: bytes) -> bytes:
    return kind + perf_counter_ns().to_bytes(8, "little")


def _timed(call: Callable[[], Any], n: int, pause_s: float) -> list[float]:
    """Each call after a pause, a short one without sleeping; one more before, to warm up."""
    times = []
    call()
    with no_collections():
        for _ in range(n):
            if pause_s >= _SLEEP_S_MIN:
                time.sleep(pause_s)
            start = begin = perf_counter_ns()
            while start - begin < pause_s * 1e9 and pause_s < _SLEEP_S_MIN:
                start = perf_counter_ns()
            call()
            times.append((perf_counter_ns() - start) / 1000)
    return times
