"""A pool in a separate process, whose blocks and threads others borrow."""

from __future__ import annotations

import os
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np

import kvpool
from bench.attention.shapes import HEADS, filled_pool, query


class Subject:
    """Answers the questions of bench.attention.peers."""

    def __init__(self) -> None:
        self.pool: kvpool.Pool | None = None
        self.stop = Event()
        self.decoding: Thread | None = None
        self.steps: list[float] = []

    def listen(self, name: str, layout: dict[str, Any], blocks: int, threads: int) -> str:
        """Makes the pool, and gives its address."""
        self.pool = filled_pool(kvpool.KVLayout(**layout), blocks, name=name, attend_threads=threads)
        return self.pool.peers.listen(f"unix:@kvpool-bench-{os.getpid()}")

    def decode(self, blocks: int) -> None:
        """Decodes over blocks of its pool until asked how long the steps took."""
        assert self.pool is not None
        pool = self.pool
        seq = pool.sequence(pool.alloc(blocks, kvpool.DRAM, evict=False))
        q = query(pool, HEADS)
        self.stop.clear()
        self.steps = []

        def run() -> None:
            while not self.stop.is_set():
                start = perf_counter()
                pool.attend(0, q, [seq]).wait()
                self.steps.append(perf_counter() - start)
            addrs = seq.addrs
            seq.close()
            pool.free(addrs)

        self.decoding = Thread(target=run)
        self.decoding.start()

    def decoded(self) -> float:
        """The median step, in seconds."""
        self.stop.set()
        assert self.decoding is not None
        self.decoding.join()
        return float(np.median(self.steps))

    def close(self) -> None:
        """Closes the pool."""
        if self.pool is not None:
            self.pool.close()
