"""A storage of SGLang's HiCache: pages of its host memory, kept in kvpool's.

SGLang makes it by ``--hicache-storage-backend dynamic`` with ``"interface_v1": 1``. It copies between SGLang's host
memory and pools of this process, so each rank has its own part of each page. What is told to SGLang after a failure is
that a page is not there, or was not stored: then it computes the tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import sglang

from kvpool.engines.sglang import TESTED
from kvpool.engines.versions import check_version

check_version("SGLang", sglang.__version__, TESTED)  # before the imports that another release may lack

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from kvpool.engines.sglang.options import HiCacheOptions  # noqa: E402
from kvpool.engines.sglang.storages import KV, Storages  # noqa: E402
from kvpool.engines.sglang.store import Store, bytes_of, exists, fetched, guarded, hex_keys_of  # noqa: E402
from kvpool.errors import Unsupported  # noqa: E402

__all__ = ["KvpoolHiCache"]

_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")

_T = TypeVar("_T")

_log = logging.getLogger("kvpool.engines.sglang")


class KvpoolHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages of SGLang's host memory. SGLang makes it; see docs/how-to/sglang.md. Thread-safe.

    Args:
        storage_config: Of SGLang; its ``extra_config`` has the options.
        kwargs: Of SGLang; unused.

    Raises:
        ArgumentError, ArgumentTypeError: An option is unknown or wrong.
        Unsupported: The ranks share what one of them writes (latent attention with tensor parallelism).
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise Unsupported(
                "with latent attention SGLang lets one rank write for all, and each rank has its own store here: "
                "kvpool supports such models with one rank"
            )
        options = HiCacheOptions.parse(storage_config.extra_config or {}, _OF_SGLANG)
        self._storages = Storages(options, _rank_of(storage_config), _replica_of(storage_config))
        self._metrics = StorageMetrics()

    # ---- what SGLang's host memory is

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host memory of keys and values."""
        super().register_mem_pool_host(mem_pool_host)
        anchor = getattr(mem_pool_host, "anchor_entry", None)  # of a group of pools
        self._storages.add(KV, mem_pool_host if anchor is None else anchor.host_pool)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Host memory of something else, such as states."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._storages.add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Makes the stores.

        Raises:
            ArgumentError, OutOfMemory, Unsupported, LayoutMismatch: As in `Storages.build`.
        """
        self._storages.build()

    # ---- pages of keys and values

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages are stored, from the first on."""
        return self._count(KV, keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages of the host memory. All or none."""
        return self._set(KV, self.mem_pool_host.page_size, keys, host_indices)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fills pages of the host memory, from the first on."""
        return self._get(KV, self.mem_pool_host.page_size, keys, host_indices)

    # ---- pages of several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Which lengths of the prefix are stored in all pools, each by its own policy."""
        kv_pages = self._count(KV, keys)
        hits = {KV: kv_pages} if kv_pages else {}
        lengths = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # never decides about the prefix, and is not stored here
            own = _restorable(self._exists(str(transfer.name), keys[:kv_pages]), transfer)
            if own:
                hits[transfer.name] = max(own)
            lengths &= own
        return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_set_v1`, for each pool."""
        return {each.name: self._transfer(self._set, each) for each in transfers}

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_get_v1`, for each pool."""
        return {each.name: self._transfer(self._get, each) for each in transfers}

    # ---- pages in tensors: SGLang's older interface, without "interface_v1"

    def exists(self, key: str) -> bool:
        """Whether the page is stored."""
        return self._count(KV, [key]) == 1

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a flat page."""
        return self.batch_set([key], [value])

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fills a flat page and returns it; None if it is not stored."""
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores flat pages. All or none."""
        with self._storages.use(KV) as store:
            if store is None:
                return False
            rows = np.concatenate([bytes_of(value) for value in values]) if keys else np.empty(0, np.uint8)
            return guarded("store", lambda: store.cache.put(hex_keys_of(keys), rows), -1) >= 0

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fills flat pages, from the first on; None for each that is not."""
        targets = list(target_locations)
        with self._storages.use(KV) as store:
            if store is None:
                return [None] * len(keys)
            rows = np.empty((len(keys), store.cache.block_bytes), np.uint8)
            with fetched(store, keys):
                loaded = guarded("load", lambda: store.cache.get(hex_keys_of(keys), rows), 0)
        for row, target in zip(rows[:loaded], targets, strict=False):
            bytes_of(target)[:] = row
        return targets[:loaded] + [None] * (len(keys) - loaded)

    # ---- the rest

    def clear(self) -> None:
        """Drops all pages, after the copies that are under way."""
        self._storages.clear()

    def get_stats(self) -> StorageMetrics:
        """What happened since the last call: pages and GB/s of each batch."""
        taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def close(self) -> None:
        """Gives the memory back. SGLang calls it after its threads have ended."""
        self._storages.close()

    # ----

    def _count(self, pool: str, keys: list[str]) -> int:
        with self._storages.use(pool) as store:
            return 0 if store is None else guarded("look up", lambda: _first(exists(store, keys)), 0)

    def _exists(self, pool: str, keys: list[str]) -> npt.NDArray[np.bool_]:
        none = np.zeros(len(keys), bool)
        with self._storages.use(pool) as store:
            return none if store is None else guarded("look up", lambda: exists(store, keys), none)

    def _transfer(self, move: Callable[[str, int, list[str], Any], list[bool]], transfer: PoolTransfer) -> list[bool]:
        host_pool = self.registered_pools[transfer.name]
        return move(
            str(transfer.name), getattr(host_pool, "page_size", 1) or 1, transfer.keys or [], transfer.host_indices
        )

    def _set(self, pool: str, page_tokens: int, keys: list[str], host_indices: Any) -> list[bool]:
        pages = _pages_of(pool, page_tokens, keys, host_indices)
        with self._storages.use(pool) as store:
            if store is None or pages is None:
                return [False] * len(keys)
            began = time.perf_counter()
            stored = guarded("store", lambda: store.save(keys, pages), -1) >= 0
            if stored:
                self._count_pages(self._metrics.backup_pgs, self._metrics.backup_bandwidth, store, len(keys), began)
            return [stored] * len(keys)

    def _get(self, pool: str, page_tokens: int, keys: list[str], host_indices: Any) -> list[bool]:
        pages = _pages_of(pool, page_tokens, keys, host_indices)
        with self._storages.use(pool) as store:
            if store is None or pages is None:
                return [False] * len(keys)
            began = time.perf_counter()
            with fetched(store, keys):
                loaded = guarded("load", lambda: store.load(keys, pages), 0)
            if loaded:
                self._count_pages(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, store, loaded, began)
            return [at < loaded for at in range(len(keys))]

    def _count_pages(self, pages: list[int], rates: list[float], store: Store, n: int, began: float) -> None:
        pages.append(n)
        rates.append(n * store.cache.block_bytes / max(time.perf_counter() - began, 1e-9) / 1e9)


def _rank_of(config: Any) -> str:
    """The part of each page that this rank has: members that share pages have the same."""
    return (
        f"tp{config.tp_rank}of{config.tp_size}-pp{config.pp_rank}of{config.pp_size}"
        f"-cp{config.attn_cp_rank}of{config.attn_cp_size}"
    )


def _replica_of(config: Any) -> int:
    """The data-parallel replica. SGLang tells a storage only with attention that is data-parallel."""
    try:
        return config.dp_rank or get_parallel().dp_rank or 0
    except RuntimeError:  # nobody has said it in this process
        return 0


def _first(stored: npt.NDArray[np.bool_]) -> int:
    missing = np.flatnonzero(~stored)
    return int(missing[0]) if len(missing) else len(stored)


def _pages_of(pool: str, page_tokens: int, keys: Sequence[str], host_indices: Any) -> npt.NDArray[np.int64] | None:
    """The numbers of the pages; None if the indices do not fit."""
    if host_indices is None or host_indices.numel() != len(keys) * page_tokens:
        _log.error("SGLang's pool %s: %d keys do not fit the indices of pages of %d", pool, len(keys), page_tokens)
        return None
    first: npt.NDArray[np.int64] = host_indices.cpu().numpy().astype(np.int64)[::page_tokens]
    return first // page_tokens


def _restorable(stored: npt.NDArray[np.bool_], transfer: PoolTransfer) -> set[int]:
    """Lengths of the prefix, in pages, that a pool can restore."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _first(stored) + 1))
    window = max(1, len(transfer.keys) if transfer.keys else 1)
    return {end for end in range(1, len(stored) + 1) if stored[max(0, end - window) : end].all()}
