"""A process with one of vLLM's secondary tiers over memory for a primary one; answers a JSON object for each line."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from typing import Any

import numpy as np

BLOCKS, BLOCK_BYTES = 64, 2 << 20  # of a job


class Tier:
    """Commands are methods; what they return is the answer."""

    def start(self, tier: dict[str, Any]) -> dict[str, Any]:
        """The tier as vLLM's factory makes it, over the memory of two jobs."""
        import vllm
        from vllm.v1.kv_offload import config as offloading
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        from kvpool.engines.vllm import register

        register()
        made = offloading.OffloadingConfig(
            groups=(offloading.OffloadingGroupConfig(16, ("one",), 0),),
            worker_kv_bytes_per_block=BLOCK_BYTES,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": 2 * BLOCKS * BLOCK_BYTES},
            engine_id=f"bench-{os.getpid()}",
            model=offloading.OffloadingModelConfig("bench", "bfloat16"),
            cache=offloading.OffloadingCacheConfig(16, 1),
            parallel=offloading.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        self.rows: Any = np.random.default_rng(0).integers(0, 255, (2 * BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.tier = SecondaryTierFactory.create_secondary_tier(tier, self.rows.data, TieringOffloadingSpec(made))
        self.jobs = itertools.count()
        self.context = ReqContext("bench")
        return {"vllm": vllm.__version__}

    def store(self, number: int) -> dict[str, Any]:
        """Seconds until the first half of the rows is stored under new keys."""
        self.keys = [hashlib.sha256(b"%d %d" % (number, at)).digest() + bytes(4) for at in range(BLOCKS)]
        return {"s": self._job(np.arange(BLOCKS), loads=False)}

    def load(self) -> dict[str, Any]:
        """Seconds until the other half has the content of the first."""
        self.rows[BLOCKS:] = 0
        took = self._job(np.arange(BLOCKS, 2 * BLOCKS), loads=True)
        if not np.array_equal(self.rows[BLOCKS:], self.rows[:BLOCKS]):
            raise RuntimeError("the content differs")
        return {"s": took}

    def look_up(self) -> dict[str, Any]:
        """Microseconds for each block that is there, in which the scheduler waits."""
        began = time.perf_counter()
        told = [self.tier.lookup(key, self.context).name for key in self.keys]
        took = time.perf_counter() - began
        self.tier.on_schedule_end(None)
        return {"us": 1e6 * took / len(told), "hits": told.count("HIT")}

    def copy(self) -> dict[str, Any]:
        """Seconds of a plain copy of as many bytes by one thread."""
        began = time.perf_counter()
        self.rows[BLOCKS:] = self.rows[:BLOCKS]
        return {"s": time.perf_counter() - began}

    def _job(self, chunks: Any, loads: bool) -> float:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        job = TransferJob(next(self.jobs), self.keys, chunks.astype(np.int32), loads, self.context)
        began = time.perf_counter()
        (self.tier.submit_load if loads else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        took = time.perf_counter() - began
        (ended,) = self.tier.get_finished_jobs()
        if not ended.success:
            raise RuntimeError(f"the job has failed: {ended}")
        return took


def main() -> None:
    """Answers until its input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints what it likes
    tier = Tier()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            told = getattr(tier, command.pop("do"))(**command)
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(told) + "\n")
        out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
