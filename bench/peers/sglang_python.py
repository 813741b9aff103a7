"""SGLang's RadixCache."""

from __future__ import annotations

from array import array
from typing import Any

from bench.peers.sglang_common import Allocator, TreeSubject, stub_torchvision

stub_torchvision()

import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402


class PythonTree:
    """Calls RadixCache as SGLang's scheduler does."""

    def __init__(self, page: int) -> None:
        self._cache: Any = RadixCache.create_simulated(mock_allocator=Allocator(), page_size=page)
        self._values = torch.arange(1 << 16, dtype=torch.int64)

    def insert(self, tokens: array[int]) -> object:
        return self._cache.insert(InsertParams(key=RadixKey(tokens), value=self._values[: len(tokens)]))

    def match(self, tokens: array[int]) -> int:
        return int(self._cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_prefix_len)

    def match_and_collect(self, tokens: array[int]) -> Any:
        found = self._cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        return self._cache.path_device_indices(found.last_device_node)

    def evict(self, tokens: int) -> int:
        return int(self._cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)


class Subject(TreeSubject):
    """See bench/remote.py."""

    def __init__(self) -> None:
        super().__init__(PythonTree)
