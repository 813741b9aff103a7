"""The cache's events in vLLM's classes, and what they need of vLLM's requests. Runs where vLLM is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    hash_block_tokens,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvpool.engines.vllm.kv_events import Described, KvEvents, Stored
from kvpool.engines.vllm.plans import SavePlan
from kvpool.pool import Pool

__all__ = ["ReportedEvents", "wanted"]


def wanted(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


class ReportedEvents:
    """What the pool caches and drops, for ``take_events``. Not thread-safe: the scheduler's one thread calls it.

    Args:
        vllm_config: VLLM's.
        pool: It has cached nothing yet.
    """

    def __init__(self, vllm_config: Any, pool: Pool) -> None:
        self._block_tokens = pool.kv_layout.block_tokens
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._events = KvEvents(
            lambda cached: pool.subscribe(include_cached=cached),
            self._block_tokens,
            lambda parent, tokens: hash_block_tokens(hash_function, parent, tokens),
        )

    def saving(self, request: Any, plan: SavePlan) -> None:
        """A request's blocks will be saved."""
        blocks = len(plan.blocks)
        if len(request.block_hashes) < blocks:
            return  # vLLM hashes in another granularity
        lora = request.lora_request
        described = Described(
            request.block_hashes,
            (lambda first, end: list(self._extra_keys(request, first, end))) if plan.namespace else None,
            None if lora is None else (lora.adapter_id, lora.name),
        )
        self._events.saving(plan.namespace, plan.tokens, described)

    def take(self) -> list[KVCacheEvent]:
        """What has happened since the last call."""
        return [
            self._stored(each) if isinstance(each, Stored) else _removed(each.hashes) for each in self._events.take()
        ]

    def _extra_keys(self, request: Any, first: int, end: int) -> Iterator[tuple[Any, ...] | None]:
        """Of blocks [first, end). From the beginning: only so vLLM knows which image comes next."""
        feature = 0
        for block in range(0 if request.mm_features else first, end):
            start = block * self._block_tokens
            keys, feature = generate_block_hash_extra_keys(request, start, start + self._block_tokens, feature)
            if block >= first:
                yield keys

    def _stored(self, event: Stored) -> BlockStored:
        number, name = event.lora or (None, None)
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in event.hashes],
            parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
            token_ids=event.tokens,
            block_size=self._block_tokens,
            lora_id=number,
            medium=MEDIUM_CPU,
            lora_name=name,
            extra_keys=None if event.extra_keys is None else to_event_extra_keys(event.extra_keys),
            group_idx=0,
        )


def _removed(hashes: list[bytes]) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=[maybe_convert_block_hash(each) for each in hashes], medium=MEDIUM_CPU, group_idx=0
    )
