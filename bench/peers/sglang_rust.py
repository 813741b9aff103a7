"""SGLang's tree in Rust, through the Python adapter that SGLang itself uses."""

from __future__ import annotations

from array import array
from typing import Any

from bench.peers.sglang_common import Allocator, TreeSubject, stub_torchvision

stub_torchvision()

import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402

_FULL = ComponentType.FULL


class RustTree:
    """Drives the steps of an insertion and an eviction as SGLang's cache does."""

    def __init__(self, page: int) -> None:
        self._core: Any = RustUnifiedTreeCore(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=Allocator(),
                page_size=page,
                tree_components=(_FULL,),
            )
        )
        self._root = self._core.empty_match_result.last_device_node
        self._values = torch.arange(1 << 16, dtype=torch.int64)

    def insert(self, tokens: array[int]) -> object:
        step = self._core.begin_insert(InsertParams(key=RadixKey(tokens), value=self._values[: len(tokens)]))
        while step.result is None:
            step = self._core.resume_insert()
        return step.result.prefix_len

    def match(self, tokens: array[int]) -> int:
        return int(self._core.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_prefix_len)

    def match_and_collect(self, tokens: array[int]) -> Any:
        found = self._core.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        return self._core.collect_full_device_indices(found.last_device_node, self._root)

    def evict(self, tokens: int) -> int:
        evicted = 0
        tracker = {_FULL: 0}
        self._core.evict_device_start(_FULL, tokens)
        try:
            while tracker[_FULL] < tokens:
                step = self._core.evict_device_next_node(_FULL, tracker)
                self._count(step, tracker)
                if step.node_id is not None:
                    self._count(self._core.evict_device_leaf(step.node_id, False), tracker)
                elif not step.made_progress:
                    break
            evicted = tracker[_FULL]
        finally:
            self._core.evict_device_end(_FULL)
        return evicted

    def _count(self, step: Any, tracker: dict[Any, int]) -> None:
        for component, tokens in step.tracker.items():
            tracker[component] += tokens
        step.device_frees.clear()
        step.host_frees.clear()
        step.cache_actions.clear()


class Subject(TreeSubject):
    """See bench/remote.py."""

    def __init__(self) -> None:
        super().__init__(RustTree)
