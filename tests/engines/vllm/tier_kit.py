"""vLLM's own TieringOffloadingManager with kvpool's tier below it, as vLLM's spec makes it; and what drives it."""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np

with warnings.catch_warnings():  # of what vLLM imports
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvpool.engines.vllm import TIER, register

BLOCK_BYTES = 4096  # the least that vLLM's primary tier takes: a page
_engines = itertools.count()
register()


def config(
    primary: int, tier: dict[str, Any], *, model: str = "tiny", block_bytes: int = BLOCK_BYTES, world_size: int = 1,
    **fields: Any,
) -> Any:  # fmt: skip
    """An engine's: `world_size` workers divide the heads, and have `block_bytes` together."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("one",), group_id=0),),
        worker_kv_bytes_per_block=block_bytes // world_size,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": primary * block_bytes, "secondary_tiers": [{"type": TIER, **tier}]},
        engine_id=f"kvpool-test-{os.getpid()}-{next(_engines)}",  # names a file in /dev/shm
        model=OffloadingModelConfig(model, "float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, world_size, world_size, 1, 1, 1, 0, 1, None, True),
        **{"kv_cache_layout": "LBNHC"} | fields,
    )


def key(number: int, hashed: Any = hashlib.sha256) -> OffloadKey:
    return make_offload_key(hashed(number.to_bytes(4, "big")).digest(), 0)


def keys(first: int, count: int) -> list[OffloadKey]:
    return [key(number) for number in range(first, first + count)]


def content_of(own: bytes, block_bytes: int = BLOCK_BYTES) -> Any:
    seed = int.from_bytes(hashlib.sha256(own).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 255, block_bytes, dtype=np.uint8)


class Offloading:
    """An engine's offloading: vLLM's manager, its primary tier with `primary` blocks, and kvpool's tier."""

    def __init__(self, primary: int, tier: dict[str, Any] | None = None, **more: Any) -> None:
        """`more`: arguments of `config`."""
        self.spec = TieringOffloadingSpec(config(primary, tier or {"dram_blocks": 16}, **more))
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._requests = itertools.count()

    def request(self) -> ReqContext:
        context = ReqContext(req_id=f"request-{next(self._requests)}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """A step of the scheduler, and all that the tier does after it."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        wait(self.tier._jobs)

    def store(self, own: Sequence[OffloadKey]) -> bool:
        """What the engine has computed goes to the primary tier, and from there to kvpool's."""
        context = self.request()
        prepared = self.manager.prepare_store(own, context)
        if prepared is None:
            return False
        for name, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.rows[chunk] = content_of(name, self.rows.shape[1])
        if prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.step()
        self.step()
        return True

    def look_up(self, own: Sequence[OffloadKey]) -> list[LookupResult]:
        """As a request that waits: until the tiers say of each whether it is there."""
        context = self.request()
        for _ in range(4):
            told = [self.manager.lookup(name, context) for name in own]
            if not {LookupResult.HIT_PENDING, LookupResult.RETRY} & set(told):
                break
            self.step()
        self.manager.on_request_finished(context)
        return told

    def found(self, own: Sequence[OffloadKey]) -> list[bool]:
        """Which can be loaded, each with the content that was stored: a wrong one is an AssertionError."""
        told = self.look_up(own)
        hits = [name for name, result in zip(own, told, strict=True) if result is LookupResult.HIT]
        context = self.request()
        loaded = self.manager.prepare_load(hits, context)
        for name, chunk in zip(hits, loaded.chunk_ids, strict=True):
            assert np.array_equal(self.rows[chunk], content_of(name, self.rows.shape[1]))
        self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return [result is LookupResult.HIT for result in told]

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()
