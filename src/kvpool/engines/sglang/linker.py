"""A linker between SGLang's device memory and kvpool, with no host memory of SGLang's between.

SGLang makes it by ``--enable-unified-cache-external-linker`` with the backend ``dynamic``. All pages of the device are
adopted once. Saves and loads run in a thread each, in the order in which SGLang asks for them, after the work that
SGLang had given its streams by then. SGLang locks the pages of a save until it is told that the save has ended, and
gives each load slots that nothing else uses.

A load that cannot be had is refused when SGLang queues it: then SGLang computes the tokens. After that its pages are
pinned. If the copy fails all the same, SGLang answers all requests that load in that batch with an error, and keeps
none of the content.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import sglang

from kvpool.engines.sglang import TESTED
from kvpool.engines.versions import check_version

check_version("SGLang", sglang.__version__, TESTED)  # before the imports that another release may lack

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (  # noqa: E402
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from kvpool.engines.sglang import sleeping  # noqa: E402
from kvpool.engines.sglang.loads import Lookups, QueuedLoad  # noqa: E402
from kvpool.engines.sglang.options import LinkerOptions  # noqa: E402
from kvpool.engines.sglang.pages import device_pieces  # noqa: E402
from kvpool.engines.sglang.store import AdoptedStore, guarded, hex_keys_of  # noqa: E402
from kvpool.errors import OutOfBlocks, StateError, Unsupported  # noqa: E402

__all__ = ["KvpoolLinker"]

_log = logging.getLogger("kvpool.engines.sglang")


class KvpoolLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Keeps pages of SGLang's device memory in DRAM. SGLang makes it; see docs/how-to/sglang.md.

    Not thread-safe: SGLang's scheduler calls it.

    Args:
        server_args: Of SGLang: whether its memory saver is in use.
        params: Of SGLang: its memory, and how many ranks there are.
        components: Of SGLang's tree: what else than full attention the model has.
        extra_config: ``linker_extra_config``.
        forward_stream: The CUDA stream that computes; None on a CPU.

    Raises:
        ArgumentError, ArgumentTypeError: An option is unknown or wrong.
        OutOfMemory: The machine has not so much memory.
        Unsupported, LayoutMismatch: The model's cache is of a kind that kvpool does not know; or each rank has some of
            the layers (pipeline parallelism); or SGLang's memory saver is in use with the route ucx.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Collection[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        options = LinkerOptions.parse(extra_config or {})
        others = sorted(each.name for each in components if each.name != "FULL")
        if others:
            raise Unsupported(f"the model has {', '.join(others)}; KvpoolLinker supports full attention alone")
        if params.pp_size > 1:  # SGLang does not make its stages agree on what a linker finds
            raise Unsupported(f"SGLang runs in {params.pp_size} pipeline stages; KvpoolLinker supports one")
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        pieces = device_pieces(kvcache, params.page_size)
        pages = options.pages(sum(piece.shape[1] for piece in pieces))
        self._store = AdoptedStore(pieces, pages)
        self._keep_on_flush = options.keep_on_flush
        self._page_tokens = params.page_size
        self._ranks = _ranks_of(params)
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: kvcache}
        self.layer_done_counter = LayerWiseLoadCounter(kvcache.layer_num)
        self._lookups = Lookups(self._store.cache)
        self._queued: dict[str, QueuedLoad] = {}
        self._saved: deque[Future[bool]] = deque()
        self._loader = ThreadPoolExecutor(1, "kvpool-load")
        self._saver = ThreadPoolExecutor(1, "kvpool-save")
        self._closed = False
        try:
            sleeping.follow(self, self._store.pool.settings.routes, getattr(server_args, "enable_memory_saver", False))
        except BaseException:
            self.close()
            raise
        _log.info("kvpool keeps %d pages of %d bytes in DRAM", pages, self._store.cache.block_bytes)

    # ---- loads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Lengths of the prefix, in pages, that are stored. They stay so until the next look-up or batch."""
        transfer = _only(transfers)
        if transfer is None:
            return []
        stored = guarded("look up", lambda: self._lookups.look_up(hex_keys_of(transfer.keys)), 0)
        return list(range(1, stored + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queues a load. False: it cannot be had, and SGLang computes the tokens.

        Where SGLang has several ranks, all have to answer alike: the load is queued in any case, and fails at its end.
        """
        transfer = _only(transfers)
        if transfer is None:
            return False
        load = QueuedLoad(list(transfer.keys), self._pages_of(transfer))
        load.hit = guarded("look up", lambda: self._lookups.take(hex_keys_of(transfer.keys)), None)
        if load.hit is None and self._ranks == 1:
            return False
        self._queued[rid] = load
        return True

    def start_layer_wise_loading(self) -> int:
        """Begins all queued loads. Returns the number under which SGLang waits for them; -1 without loads."""
        self._lookups.clear()  # the batch is complete: SGLang looks the requests that wait up again
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index: int = self.layer_done_counter.update_producer()
        # What SGLang's streams have now may still use the slots. What it gives them later waits for the load.
        self._loader.submit(self._carry_out, index, loads, self.record_offload_ready())
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until nothing writes to the slots of these loads. Whether all of them have been filled."""
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        """Forgets a load that has not begun."""
        load = self._queued.pop(rid, None)
        if load is None:
            return False
        load.close()
        return True

    def _carry_out(self, index: int, loads: list[QueuedLoad], ready: Sequence[Any]) -> None:
        """In the thread of loads. One that has no pages fails the batch, after the others have theirs."""
        try:
            _await(ready)
            found = [load for load in loads if load.hit is not None]
            keys = [key for load in found for key in load.keys]
            loaded = self._store.load(keys, np.concatenate([load.pages for load in found])) if found else 0
            if loaded != len(keys):
                raise StateError(f"{loaded} of {len(keys)} pages were there")
            if len(found) < len(loads):
                raise StateError("pages were evicted between SGLang's look-up and its load")
        except BaseException as error:
            _log.warning("kvpool could not load pages of SGLang's: %s", error)
            self.layer_done_counter.fail(index, error)
        else:
            for layer in range(self.layer_done_counter.num_layers):
                self.layer_done_counter.complete(index, layer)
        finally:
            for load in loads:
                load.close()

    # ---- saves

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Begins to save pages. False: kvpool does not keep what they hold."""
        transfer = _only(transfers)
        if transfer is None:
            return False
        pages, ready = self._pages_of(transfer), self.record_offload_ready()
        self._saved.append(self._saver.submit(self._save, list(transfer.keys), pages, ready))
        return True

    def _save(self, keys: list[str], pages: npt.NDArray[np.int64], ready: Sequence[Any]) -> bool:
        """In the thread of saves."""
        try:
            _await(ready)
            self._store.save(keys, pages)
        except OutOfBlocks as error:  # all that is stored is being loaded, or the cache is smaller than this
            _log.debug("kvpool has no room for pages of SGLang's: %s", error)
        except BaseException as error:
            _log.warning("kvpool could not save pages of SGLang's: %s", error)
        else:
            return True
        return False

    def num_completed_offloads(self) -> int:
        """How many saves have ended, well or not, and are not popped yet; the oldest first."""
        ended = 0
        for save in self._saved:
            if not save.done():
                break
            ended += 1
        return ended

    def pop_completed_offload(self) -> bool:
        """Whether the oldest save has stored its pages."""
        return self._saved.popleft().result()

    # ---- the end, and the sleep

    def suspend(self) -> bool:
        """SGLang unmaps its pages next: waits for all copies, and touches the pages no more until `resume`.

        Returns and raises as `AdoptedStore.suspend`.
        """
        self._await_copies()
        return self._store.suspend()

    def resume(self) -> None:
        """SGLang has its pages again. What is stored is there unless SGLang has flushed it."""
        self._store.resume()

    def _await_copies(self) -> None:
        for executor in (self._saver, self._loader):
            if not self._closed:
                executor.submit(int).result()  # after all that was submitted before

    def reset(self) -> None:
        """Waits for all copies. SGLang flushes its cache; unless `keep_on_flush` is set all stored pages go as well."""
        for load in self._queued.values():
            load.close()
        self._queued.clear()
        self._lookups.clear()
        self._await_copies()
        self._saved.clear()
        self.layer_done_counter.reset()
        cache = self._store.cache
        if not (self._keep_on_flush or cache.closed or self._store.pool.closed):
            cache.evict(len(cache))

    def close(self) -> None:
        """Waits for all copies, and gives the memory back. Idempotent."""
        if self._closed:
            return
        self.reset()
        self._closed = True
        self._saver.shutdown()
        self._loader.shutdown()
        if not self._store.pool.closed:
            _log.info("kvpool's linker has served: %s", self._store.cache.stats())
        self._store.cache.close()
        self._store.pool.close()

    def _pages_of(self, transfer: PoolTransfer) -> npt.NDArray[np.int64]:
        first: npt.NDArray[np.int64] = transfer.device_indices.cpu().numpy()[:: self._page_tokens]
        pages: npt.NDArray[np.int64] = first // self._page_tokens
        return pages


def _only(transfers: list[PoolTransfer]) -> PoolTransfer | None:
    """The transfer of keys and values; None if there are others or it is empty."""
    if len(transfers) == 1 and transfers[0].name == PoolName.KV and transfers[0].keys:
        return transfers[0]
    return None


def _await(events: Sequence[Any]) -> None:
    """Until the GPU has come to where SGLang's streams were when the events were recorded."""
    for event in events:
        event.synchronize()


def _ranks_of(params: Any) -> int:
    """How many ranks of SGLang decide together."""
    import torch.distributed as distributed

    group = getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None)
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    context = getattr(params, "attn_cp_size", 1) or 1
    return int(distributed.get_world_size(group=group)) * int(context)
