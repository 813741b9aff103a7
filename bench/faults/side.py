"""A pool in a separate process, which sends, lends and logs what it notices and when; see survive.py."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool
from bench.measure import no_collections, summarize
from kvpool.types import Route

BLOCK_BYTES = 64 << 10
_BLOCKS = 256
_SECRET = "bench"


class Subject:
    """One pool; a question is a call of one of its methods (bench/remote.py)."""

    def start(self, name: str, routes: list[Route], lease_s: float) -> int:
        """Makes the pool; the process's pid."""
        layout = kvpool.RawLayout(block_bytes=BLOCK_BYTES)
        self._pool = kvpool.Pool(
            layout, _BLOCKS, 0, name=name, secret=_SECRET, routes=tuple(routes), lease_s=lease_s, huge_pages="never"
        )
        self._pool.tensor(kvpool.HBM).numpy()[:] = 1
        self._addrs = self._pool.alloc(32)
        return os.getpid()

    def listen(self) -> str:
        return self._pool.peers.listen(f"unix:@kvpool-bench-{os.getpid()}")

    def connect(self, address: str) -> str:
        return self._pool.peers.connect(address)

    def take_blocks(self, peer: str) -> int:
        """Holds blocks of a peer: some are lent, some reserved for a transfer that has begun."""
        self._lent = self._pool.alloc(32, instance=peer)
        self._stream = self._pool.transfer(peer, self._addrs, layerwise=True)
        self._stream.send_layer(0)
        return len(self._lent)

    def attend(self) -> None:
        """From now on somebody takes what arrives."""

        def take() -> None:
            with contextlib.suppress(kvpool.Error):
                while True:
                    item = self._pool.inbox.receive()
                    if item is not None:
                        item.close()

        threading.Thread(target=take, daemon=True).start()

    def watch(self, peer: str, send: bool) -> None:
        """Sends until the peer is lost, or only looks; notes when that was told, and when nothing of it was left."""
        self._told_ns = self._released_ns = 0

        def look() -> None:
            try:
                while send:
                    self._pool.transfer(peer, self._addrs[:8]).wait()
                while any(one.name == peer for one in self._pool.peers.list()):
                    time.sleep(0.0002)
            except kvpool.PeerLost:
                pass
            self._told_ns = time.monotonic_ns()
            while _at_peers(self._pool):
                time.sleep(0.0002)
            self._released_ns = time.monotonic_ns()

        self._watcher = threading.Thread(target=look, daemon=True)
        self._watcher.start()

    def seen(self, wait_s: float) -> dict[str, Any]:
        """What watch() has noted, waiting for its end for so long."""
        self._watcher.join(wait_s)
        stats = self._pool.stats().hbm
        return {"told_ns": self._told_ns, "released_ns": self._released_ns, "quarantined": stats.quarantined}

    def overshoot(self, peer: str, n: int, waits: bool) -> list[float]:
        """How much later than its deadline each of n transfers to a peer that does not answer ended; milliseconds."""
        late = []
        for number in range(n):
            timeout = 0.01 + 0.001 * (number % 20)
            start = time.perf_counter()
            handle = self._pool.transfer(peer, self._addrs[:4], timeout=timeout)
            if waits:
                error = handle.exception()
            else:
                select.select([handle], [], [])
                error = handle.exception(0)
            late.append((time.perf_counter() - start - timeout) * 1e3)
            if not isinstance(error, kvpool.DeadlineExceeded):
                raise AssertionError(f"it ended with {error!r}")
        return late

    def load(self, peer: str, n: int) -> int:
        """Begins n transfers that a peer does not answer."""
        self._stuck = [self._pool.transfer(peer, self._addrs, timeout=60) for _ in range(n)]
        return sum(not one.done() for one in self._stuck)

    def unload(self) -> None:
        """Waits for the end of what load() began, now that the peer answers again."""
        for one in self._stuck:
            one.exception()

    def send(self, peer: str, n: int) -> dict[str, float]:
        """Times n small transfers to a peer that is well."""
        times: list[float] = []
        to: npt.NDArray[np.uint64] = self._pool.alloc(4, instance=peer)
        with no_collections():
            for _ in range(n):
                start = time.perf_counter_ns()
                self._pool.transfer(peer, self._addrs[:4], to=to, private=b"").wait()
                times.append((time.perf_counter_ns() - start) / 1e3)
        self._pool.free(to)
        sample = summarize(times)
        return {"median_us": sample.median_us, "p99_us": sample.p99_us}


def _at_peers(pool: kvpool.Pool) -> int:
    stats = pool.stats().hbm
    return stats.lent + stats.reserved + stats.quarantined
