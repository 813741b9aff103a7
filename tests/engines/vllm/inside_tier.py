"""What the tests do to kvpool's tier in the process of vLLM's scheduler, and how vLLM's offloading runs on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvpool
from kvpool.engines import keyed_members

keyed_members.ASK_SECONDS = 0.5  # another engine may be busy, and so may the machine


def counts(manager: Any) -> dict:
    """What the tier holds, and which of vLLM's jobs are under way."""
    (tier,) = manager.secondary_tiers
    tier.drain_jobs()
    tier._store.cache.audit()
    return {"jobs": len(manager._jobs), **tier._store.cache.stats()}


def poison(manager: Any) -> int:
    """Changes what the tier holds, and nothing else."""
    (tier,) = manager.secondary_tiers
    flat = tier._store.pool.tensor(kvpool.DRAM).numpy().view(np.uint8).reshape(-1)
    np.bitwise_xor(flat, 0x15, out=flat)
    return len(flat)


def asked(manager: Any) -> list[str]:
    """The other members of the cluster that the tier asks now."""
    (tier,) = manager.secondary_tiers
    members = tier._store.members
    assert members is not None
    return members.asked()


def fail_loads(manager: Any) -> int:
    """Loads fail from now on."""
    (tier,) = manager.secondary_tiers

    def failing(*given: Any) -> None:
        raise kvpool.DeviceLost("the test says so")

    tier._store.load = failing
    return 0


class CpuSpec(TieringOffloadingSpec):
    """vLLM's, with copies between its two memories that need no GPU: vLLM has none. Blocks are stored one by one."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CpuWorker(kv_caches, region)
        return self._worker


class CpuWorker(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion):
        self.region = region
        self.pairs = [(each.tensor, region.create_next_worker_view(each.page_size_bytes)) for each in kv_caches.tensors]
        self.ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        for blocks, chunks in self.pairs:
            chunks[dst_spec.chunk_ids] = blocks[src_spec.block_ids]
        self.ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for blocks, chunks in self.pairs:
            blocks[dst_spec.block_ids] = chunks[src_spec.chunk_ids]
        self.ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self.pairs.clear()
        self.region.cleanup()
