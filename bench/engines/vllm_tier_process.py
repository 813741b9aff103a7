"""A process with one of vLLM's secondary tiers over memory for a primary one; answers a JSON object for each line."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from typing import Any

import numpy as np

JOB_BYTES = 128 << 20


class Tier:
    """Commands are methods; what they return is the answer."""

    def start(self, tier: dict[str, Any], block_bytes: int) -> dict[str, Any]:
        """The tier as vLLM's factory makes it, over the memory of two jobs."""
        self.blocks = JOB_BYTES // block_bytes
        import vllm
        from vllm.v1.kv_offload import config as offloading
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        from kvpool.engines.vllm import register

        register()
        made = offloading.OffloadingConfig(
            groups=(offloading.OffloadingGroupConfig(16, ("one",), 0),),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": 2 * self.blocks * block_bytes},
            engine_id=f"bench-{os.getpid()}",
            model=offloading.OffloadingModelConfig("bench", "bfloat16"),
            cache=offloading.OffloadingCacheConfig(16, 1),
            parallel=offloading.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        self.rows: Any = np.random.default_rng(0).integers(0, 255, (2 * self.blocks, block_bytes), dtype=np.uint8)
        self.tier = SecondaryTierFactory.create_secondary_tier(tier, self.rows.data, TieringOffloadingSpec(made))
        self.jobs = itertools.count()
        self.context = ReqContext("bench")
        return {"vllm": vllm.__version__}

    def store(self, number: int) -> dict[str, Any]:
        """Seconds until the first half of the rows is stored under new keys."""
        self.keys = self._keys(b"%d" % number)
        return {"s": self._job(np.arange(self.blocks), loads=False)}

    def load(self) -> dict[str, Any]:
        """Seconds until the other half has the content of the first."""
        self.rows[self.blocks :] = 0
        took = self._job(np.arange(self.blocks, 2 * self.blocks), loads=True)
        self._check()
        return {"s": took}

    def load_beside_a_store(self, number: int) -> dict[str, Any]:
        """Seconds until the load has ended that is submitted after a store of as many other blocks."""
        self.rows[self.blocks :] = 0
        self._submit(self._keys(b"beside %d" % number), np.arange(self.blocks), loads=False)
        began = time.perf_counter()
        load = self._submit(self.keys, np.arange(self.blocks, 2 * self.blocks), loads=True)
        ended: dict[int, float] = {}
        while load not in ended:
            for each in self.tier.get_finished_jobs():
                ended[each.job_id] = time.perf_counter() - began
            time.sleep(0.0002)  # a scheduler's step takes longer
        self.tier.drain_jobs()
        for _ in self.tier.get_finished_jobs():
            pass
        self._check()
        return {"s": ended[load]}

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
        self.rows[self.blocks :] = self.rows[: self.blocks]
        return {"s": time.perf_counter() - began}

    def _job(self, chunks: Any, loads: bool) -> float:
        began = time.perf_counter()
        self._submit(self.keys, chunks, loads)
        self.tier.drain_jobs()
        took = time.perf_counter() - began
        (ended,) = self.tier.get_finished_jobs()
        if not ended.success:
            raise RuntimeError(f"the job has failed: {ended}")
        return took

    def _submit(self, keys: list[bytes], chunks: Any, loads: bool) -> int:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        number = next(self.jobs)
        job = TransferJob(number, keys, chunks.astype(np.int32), loads, self.context)
        (self.tier.submit_load if loads else self.tier.submit_store)(job)
        return number

    def _keys(self, name: bytes) -> list[bytes]:
        return [hashlib.sha256(b"%s %d" % (name, at)).digest() + bytes(4) for at in range(self.blocks)]

    def _check(self) -> None:
        if not np.array_equal(self.rows[self.blocks :], self.rows[: self.blocks]):
            raise RuntimeError("the content differs")


if __name__ == "__main__":
    from bench.engines.answering import answer_lines

    answer_lines(Tier())
