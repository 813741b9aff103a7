"""One process of the bench `fetch-into`: the owner of a prompt, or the engine that fetches it. See bench/remote.py."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool
from bench.measure import no_collections
from kvpool import DRAM

_LAYERS, _HEADS, _TOKENS, _DIM = 8, 8, 16, 64
LAYOUT = kvpool.KVLayout(layers=_LAYERS, kv_heads=_HEADS, head_dim=_DIM, dtype="float32", block_tokens=_TOKENS)
_SETTINGS: dict[str, Any] = {"secret": "what the bench knows", "huge_pages": "never"}


class Subject:
    """An owner (`own`), or an engine (`meet`, `fetches`)."""

    def own(self, blocks: int) -> dict[str, Any]:
        """Caches a prompt in DRAM; returns where the pool listens, and the addresses."""
        self._pool = kvpool.Pool(LAYOUT, dram_blocks=blocks, **_SETTINGS)
        addrs = self._pool.alloc(blocks, medium=DRAM)
        self._pool.insert(np.arange(blocks * _TOKENS, dtype=np.int32), addrs).close()
        where = self._pool.peers.listen(f"unix:@kvpool-bench-into-{os.getpid()}")
        return {"where": where, "addrs": self._pool.peers.addresses(addrs).tolist()}

    def meet(self, where: str, blocks: int) -> list[str]:
        """An engine with tensors of as many blocks, and as many in DRAM. Returns the routes to the owner."""
        tensors = [np.zeros((blocks, 2, _HEADS, _TOKENS, _DIM), np.float32) for _ in range(_LAYERS)]
        self._pool = kvpool.Pool(LAYOUT, hbm=tensors, engine_allocates=True, dram_blocks=blocks, **_SETTINGS)
        self._peer = self._pool.peers.connect(where)
        self._engines = self._pool.adopt(np.arange(blocks))
        self._own = self._pool.alloc(blocks, medium=DRAM)
        return list(self._pool.peers.list()[0].routes)

    def fetches(self, addrs: list[int], into: str, repeats: int) -> list[float]:
        """Microseconds of each fetch: "engine", straight into its blocks; "own", into DRAM; "both", and from there."""
        source: npt.NDArray[np.uint64] = np.array(addrs, np.uint64)
        count, times = len(source), []
        target = (self._engines if into == "engine" else self._own)[:count]
        with no_collections():
            for _ in range(repeats):
                start = time.perf_counter_ns()
                self._pool.fetch(self._peer, source, to=target).wait()
                if into == "both":
                    self._pool.copy(target, self._engines[:count])
                times.append((time.perf_counter_ns() - start) / 1000)
        return times
