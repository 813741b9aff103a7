"""A secondary tier of vLLM's offloading: blocks of its primary tier in CPU memory, kept in kvpool's.

vLLM's scheduler makes it from ``"secondary_tiers": [{"type": "kvpool"}]``. It copies between the primary tier and a
`TierStore` in two threads, one for loads and one for stores, so that no load waits for stores. What is told to vLLM
after a failure is that the blocks were not loaded, or not stored: then it computes their tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import vllm

from kvpool import _core
from kvpool.engines.versions import check_version
from kvpool.engines.vllm import TESTED

check_version("vLLM", vllm.__version__, TESTED)  # before the imports that another release may lack

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob  # noqa: E402

from kvpool.engines.vllm.tier_store import Keys, TierOptions, open_store  # noqa: E402
from kvpool.errors import Error, LayoutMismatch, OutOfBlocks  # noqa: E402

__all__ = ["KvpoolTier"]

_BLOCKS = "vllm:kvpool_tier_blocks"
_CAPACITY = "vllm:kvpool_tier_capacity_blocks"
_EVICTED = "vllm:kvpool_tier_evicted_blocks"

_T = TypeVar("_T")

_log = logging.getLogger("kvpool.engines.vllm")


class KvpoolTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps blocks of vLLM's primary tier. vLLM makes it; see docs/how-to/vllm.md. vLLM's scheduler calls it alone.

    A look-up that finds a block pins it: until the load that vLLM submits for it has ended, or until the step's end if
    it submits none. So what vLLM was told is there when it is loaded.

    Args:
        offloading_spec: Of vLLM.
        primary_kv_view: Of vLLM: the memory of the primary tier, a row of bytes for each block.
        tier_type: Of vLLM.
        backpressure_detector: Of vLLM.
        **options: Fields of `TierOptions`.

    Raises:
        ArgumentError, ArgumentTypeError: An option is unknown or wrong, or a store of this name has another size.
        LayoutMismatch: A store of this name has blocks of another size; or the rows are not bytes one after another.
        OutOfMemory: The machine has not so much memory.
    """

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        view = primary_kv_view
        if view.ndim != 2 or view.itemsize != 1 or not view.c_contiguous:
            raise LayoutMismatch(
                f"vLLM's primary tier has the shape {view.shape} and items of {view.itemsize} bytes: not a row of "
                "bytes for each block",
                shape=list(view.shape or ()),
            )
        self._keys = Keys(_identity(offloading_spec))
        parsed = TierOptions.parse(options)
        self._store = open_store(parsed, self.block_size_bytes)
        self._owns_store = parsed.store is None
        self._rows: Any = np.asarray(view).view(np.uint8)
        self._evicted = self._store.cache.stats()["evicted_blocks"]
        self._pins: dict[bytes, _core.KeyedMatch] = {}  # looked up in this step, and no load submitted yet
        self._threads = {way: ThreadPoolExecutor(1, f"kvpool-tier-{way}") for way in ("load", "store")}
        self._jobs: list[Future[JobResult]] = []
        _log.info("kvpool keeps %d blocks of %d bytes below vLLM's primary tier", *self._size())

    # ---- what the scheduler asks

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a block is stored. Never `RETRY`: a block that is being stored is a miss."""
        (own,) = self._keys.of([key])
        if own in self._pins:
            return LookupResult.HIT
        pin = _guarded("look up", lambda: self._store.pin(own), None)
        if pin is None:
            return LookupResult.MISS
        self._pins[own] = pin
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to store blocks of the primary tier."""
        self._submit("store", self._stored, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to fill blocks of the primary tier."""
        pins = [self._pins.pop(own, None) for own in self._keys.of(job_metadata.keys)]
        self._submit("load", self._loaded, job_metadata, [pin for pin in pins if pin is not None])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended since the last call, well or not. Each is told once."""
        ended = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in ended]
        return [job.result() for job in ended]

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Counts as a use of what is stored."""
        _guarded("look up", lambda: self._store.touch(self._keys.of(keys)), None)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Blocks are stored as they are computed, for each request alike."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        """Ends the pins of the look-ups for which the step has submitted no load."""
        _close(self._pins.values())
        self._pins.clear()

    def drain_jobs(self) -> None:
        """Returns when all submitted jobs have ended."""
        wait(self._jobs)

    def shutdown(self) -> None:
        """Ends all jobs and threads, and gives the memory back; that of a store with a name stays. Idempotent."""
        for threads in self._threads.values():
            threads.shutdown(wait=True)
        self.on_schedule_end(None)
        self._rows = None  # vLLM unmaps them next
        if self._owns_store:
            self._store.close()

    # ---- figures

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """The metrics of `get_stats`."""
        labels = ("store",)
        return {
            _BLOCKS: OffloadingGaugeMetadata("Blocks that kvpool's tier keeps.", labels),
            _CAPACITY: OffloadingGaugeMetadata("Blocks that kvpool's tier has room for.", labels),
            _EVICTED: OffloadingCounterMetadata("Blocks that kvpool's tier has dropped to make room.", labels),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """How full the tier is, and what it has dropped since the last call. None after the store was closed."""
        figures = _guarded("count", self._store.cache.stats, None)
        if figures is None:
            return None
        labels = (self._store.name or "",)
        stats = OffloadingConnectorStats()
        stats.set_gauge(_BLOCKS, figures["blocks"], labels)
        stats.set_gauge(_CAPACITY, figures["blocks_max"], labels)
        before, self._evicted = self._evicted, figures["evicted_blocks"]
        stats.increase_counter(_EVICTED, self._evicted - before, labels)
        return stats

    # ----

    def _size(self) -> tuple[int, int]:
        return self._store.cache.stats()["blocks_max"], self._store.cache.block_bytes

    def _submit(self, way: str, job: Callable[..., JobResult], what: TransferJob, *more: Any) -> None:
        try:
            self._jobs.append(self._threads[way].submit(job, what, *more))
        except RuntimeError:  # after the shutdown
            for pins in more:
                _close(pins)
            ended: Future[JobResult] = Future()
            ended.set_result(JobResult(what.job_id, success=False))
            self._jobs.append(ended)

    def _stored(self, job: TransferJob) -> JobResult:
        began = time.perf_counter()
        keys = self._keys.of(job.keys)
        rows = [self._rows[chunk] for chunk in job.chunk_ids]
        good = _guarded("store", lambda: self._store.save(keys, rows), False)
        return self._ended(job, len(keys) if good else 0, began, good)

    def _loaded(self, job: TransferJob, pins: list[_core.KeyedMatch]) -> JobResult:
        began = time.perf_counter()
        keys = self._keys.of(job.keys)
        rows = [self._rows[chunk] for chunk in job.chunk_ids]
        filled: list[int] = []
        try:
            _guarded("load", lambda: self._store.load(keys, rows, filled), None)
        finally:
            _close(pins)
        failed = [key for at, key in enumerate(keys) if at not in filled]
        if failed:  # vLLM would find them again, and load them again, for ever
            _guarded("drop", lambda: self._store.cache.forget(failed), 0)
        names = list(job.keys)
        return self._ended(job, len(filled), began, not failed, tuple(names[at] for at in filled))

    def _ended(self, job: TransferJob, blocks: int, began: float, good: bool, keys: Any = ()) -> JobResult:
        took = time.perf_counter() - began
        return JobResult(job.job_id, good, None if good else keys or None, took, blocks * self.block_size_bytes)


def _identity(spec: Any) -> dict[str, Any]:
    """What content depends on beside the tokens, as vLLM's own persistent tiers have it."""
    mapper = FileMapper.from_offloading_spec("", spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=True)
    return dict(mapper.get_run_config())


def _close(pins: Iterable[_core.KeyedMatch]) -> None:
    """Ends pins, the last first: the end of a prompt is dropped before its beginning."""
    for pin in reversed(list(pins)):
        pin.close()


def _guarded(what: str, call: Callable[[], _T], otherwise: _T) -> _T:
    """The result; or the other value where kvpool raises: a tier that fails is one that has nothing."""
    try:
        return call()
    except OutOfBlocks as error:  # all that is stored is being loaded
        _log.debug("kvpool has no room for blocks of vLLM's: %s", error)
    except (Error, MemoryError) as error:
        _log.warning("kvpool could not %s blocks of vLLM's: %s", what, error)
    return otherwise
