"""A secondary tier of vLLM's offloading: blocks of its primary tier in CPU memory, kept in kvpool's.

vLLM's scheduler makes it from ``"secondary_tiers": [{"type": "kvpool"}]``. It copies between the primary tier and a
`TierStore` in two threads, one for loads and one for stores, so that no load waits for stores. What is told to vLLM
after a failure is that the blocks were not loaded, or not stored: then it computes their tokens.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import vllm

from kvpool import _core
from kvpool.engines import guarding
from kvpool.engines.logs import log_as
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

from kvpool.engines.vllm.tier_members import Elsewhere, TierMembers  # noqa: E402
from kvpool.engines.vllm.tier_store import Keys, TierOptions, open_store  # noqa: E402
from kvpool.errors import ArgumentError, LayoutMismatch, Unsupported  # noqa: E402

__all__ = ["KvpoolTier"]

_BLOCKS = "vllm:kvpool_tier_blocks"
_CAPACITY = "vllm:kvpool_tier_capacity_blocks"
_EVICTED = "vllm:kvpool_tier_evicted_blocks"

_BROKEN_SECONDS = 10.0  # for which vLLM is told that a block is not there whose load has failed

_T = TypeVar("_T")

_log = logging.getLogger("kvpool.engines.vllm")


class KvpoolTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps blocks of vLLM's primary tier. vLLM makes it; see docs/how-to/vllm.md. vLLM's scheduler calls it alone.

    A look-up that finds a block pins it: until the load that vLLM submits for it has ended, or until the step's end if
    it submits none. So what vLLM was told is there when it is loaded. In a cluster, other members are asked for what is
    not here, and the load fetches it: see `TierMembers`.

    Args:
        offloading_spec: Of vLLM.
        primary_kv_view: Of vLLM: the memory of the primary tier, a row of bytes for each block.
        tier_type: Of vLLM.
        backpressure_detector: Of vLLM.
        **options: Fields of `TierOptions`.

    Raises:
        ArgumentError, ArgumentTypeError: An option is unknown or wrong; or a store of this name has another size, or
            what vLLM and the options say does not tell its blocks from those of other engines.
        LayoutMismatch: A store of this name has blocks of another size; or the rows are not bytes one after another.
        OutOfMemory: The machine has not so much memory.
        Unsupported: A thread cannot be started.
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
        log_as("vllm")
        self.locality = Locality.LOCAL
        view = primary_kv_view
        if view.ndim != 2 or view.itemsize != 1 or not view.c_contiguous:
            raise LayoutMismatch(
                f"vLLM's primary tier has the shape {view.shape} and items of {view.itemsize} bytes: not a row of "
                "bytes for each block",
                shape=list(view.shape or ()),
            )
        parsed = TierOptions.parse(options).of_engine(offloading_spec.config.engine_id)
        self._keys = Keys(_identity(offloading_spec, parsed))
        self._store = open_store(parsed, self.block_size_bytes)
        self._owns_store = parsed.store is None
        members = self._store.members
        self._members = None if members is None else TierMembers(members)
        self._rows: Any = np.asarray(view).view(np.uint8)
        self._evicted = self._store.cache.stats()["evicted_blocks"]
        self._pins: dict[bytes, _core.KeyedMatch] = {}  # looked up in this step, and no load submitted yet
        self._broken: dict[bytes, float] = {}  # stored, and cannot be loaded or dropped; until when it is a miss
        self._jobs: list[Future[JobResult]] = []
        self._threads: dict[str, ThreadPoolExecutor] = {}
        try:
            for way in ("load", "store"):
                self._threads[way] = _started(f"kvpool-tier-{way}")
        except Unsupported:
            self.shutdown()
            raise
        _log.info("kvpool keeps %d blocks of %d bytes below vLLM's primary tier", *self._size())

    # ---- what the scheduler asks

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a block is stored. `RETRY`: other members are asked. A block that is being stored is a miss."""
        (own,) = self._keys.of([key])
        if own in self._pins:
            return LookupResult.HIT
        if self._broken.get(own, 0.0) > time.monotonic():
            return LookupResult.MISS
        pin = _guarded("look up", lambda: self._store.pin(own), None)
        if pin is None:
            return LookupResult.MISS if self._members is None else self._elsewhere(self._members, own)
        self._pins[own] = pin
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to store blocks of the primary tier."""
        self._submit("store", self._stored, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to fill blocks of the primary tier."""
        keys = self._keys.of(job_metadata.keys)
        pins = [self._pins.pop(own, None) for own in keys]
        if self._members is not None:
            self._members.loading(keys)
        self._submit("load", self._loaded, job_metadata, [pin for pin in pins if pin is not None])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended since the last call, well or not. Each is told once."""
        ended: list[JobResult] = []
        running: list[Future[JobResult]] = []
        for job in self._jobs:
            if job.done():
                ended.append(job.result())
            else:
                running.append(job)
        self._jobs = running
        return ended

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Counts as a use of what is stored."""
        _guarded("look up", lambda: self._store.touch(self._keys.of(keys)), None)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Blocks are stored as they are computed, for each request alike."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        """Ends the pins of the look-ups for which the step has submitted no load; asks other members."""
        _close(self._pins.values())
        self._pins.clear()
        now = time.monotonic()
        for own in [own for own, until in list(self._broken.items()) if until <= now]:
            self._broken.pop(own, None)
        members = self._members
        if members is not None:
            _guarded("ask for", members.step_ended, None)

    def drain_jobs(self) -> None:
        """Returns when all submitted jobs have ended. Nothing is fetched from other members meanwhile.

        A fetch that is under way is cancelled: blocks that have not come are told as not loaded. Nothing that is being
        copied from or to the primary tier is. A member that has stopped while it sends is waited for until the fetch's
        deadline, as it may still write.
        """
        with self._hurried():
            wait(self._jobs)

    def shutdown(self) -> None:
        """Ends all jobs and threads, and gives the memory back; that of a store with a name stays. Idempotent."""
        members, self._members = self._members, None
        with self._hurried():
            for threads in self._threads.values():
                threads.shutdown(wait=True)
        if members is not None:
            members.close()
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

    def _hurried(self) -> contextlib.AbstractContextManager[None]:
        """What other members have is not waited for."""
        members = self._store.members
        return contextlib.nullcontext() if members is None else members.hurry()

    def _size(self) -> tuple[int, int]:
        return self._store.cache.stats()["blocks_max"], self._store.cache.block_bytes

    def _submit(self, way: str, job: Callable[..., JobResult], what: TransferJob, *more: Any) -> None:
        try:
            self._jobs.append(self._threads[way].submit(_told, job, what, *more))
        except RuntimeError:  # after the shutdown: the thread runs since the constructor, and takes no such job
            for pins in more:
                _close(pins)
            ended: Future[JobResult] = Future()
            ended.set_result(JobResult(what.job_id, success=False))
            self._jobs.append(ended)

    def _stored(self, job: TransferJob) -> JobResult:
        began = time.perf_counter()
        keys = self._keys.of(job.keys)
        rows = [self._rows[chunk] for chunk in job.chunk_ids]
        written = _guarded("store", lambda: self._store.save(keys, rows), None)
        return self._ended(job, written or 0, began, written is not None)

    def _loaded(self, job: TransferJob, pins: list[_core.KeyedMatch]) -> JobResult:
        began = time.perf_counter()
        tried: list[bool] = []
        try:
            keys = self._keys.of(job.keys)
            pins = [*pins, *self._brought(keys)]
            rows = [self._rows[chunk] for chunk in job.chunk_ids]
            _guarded("load", lambda: self._store.load(keys, rows, tried), None)
        finally:
            _close(pins)
        if len(tried) < len(keys):  # the one that raised
            tried.append(False)
        for key, good in zip(keys, tried, strict=False):
            # vLLM would find it again, and load it again, for ever. It stays if another member holds it.
            if not good and _guarded("drop", lambda key=key: self._store.cache.forget([key]), None) is None:  # type: ignore[misc]
                self._broken[key] = time.monotonic() + _BROKEN_SECONDS
        members = self._members
        if members is not None:
            members.failed([key for key, good in zip(keys, tried, strict=False) if not good])
            members.ended(keys)
        filled = tuple(name for name, good in zip(job.keys, tried, strict=False) if good)
        return self._ended(job, len(filled), began, len(filled) == len(keys), filled)

    def _elsewhere(self, members: TierMembers, own: bytes) -> LookupResult:
        known = _guarded("look up", lambda: members.look_up(own), Elsewhere.MISSING)
        return {
            Elsewhere.FOUND: LookupResult.HIT,
            Elsewhere.MISSING: LookupResult.MISS,
            Elsewhere.ASKED: LookupResult.RETRY,
        }[known]

    def _brought(self, keys: list[bytes]) -> list[_core.KeyedMatch]:
        """Fetches what is missing here from other members; what holds it here then."""
        members = self._store.members
        if members is None:
            return []
        brought = _guarded(
            "fetch", lambda: None if self._store.cache.count(keys) == len(keys) else members.bring(keys), None
        )
        return [] if brought is None else [brought]

    def _ended(self, job: TransferJob, blocks: int, began: float, good: bool, keys: Any = ()) -> JobResult:
        took = time.perf_counter() - began
        return JobResult(job.job_id, good, None if good else keys or None, took, blocks * self.block_size_bytes)


def _identity(spec: Any, options: TierOptions) -> dict[str, Any]:
    """What the bytes of a block depend on beside the tokens.

    vLLM tells its tiers neither the settings of the model (rotary embeddings, revision, quantization) nor which
    attention wrote the pages: the option `model` does.

    Raises:
        ArgumentError: Engines share the store or a cluster, and vLLM does not say how its cache is laid out.
    """
    config = spec.config
    canonical = config.canonical_layout
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=canonical)
    if (options.store is not None or options.cluster) and config.kv_cache_layout is None:
        shared = f"the cluster {options.cluster}" if options.store is None else f"the store {options.store}"
        raise ArgumentError(f"{shared} may be shared, and vLLM does not say how its cache is laid out")
    identity = dict(mapper.get_run_config(), model=options.model, layout=config.kv_cache_layout, canonical=canonical)
    if canonical:
        return identity
    parallel = config.parallel
    return identity | {
        "world_size": parallel.world_size,
        "replicated": config.replicated_layout,
        "worker_bytes": config.worker_kv_bytes_per_block,
    }


def _started(name: str) -> ThreadPoolExecutor:
    """An executor whose one thread runs. So a job that it refuses later never runs.

    Raises:
        Unsupported: The thread cannot be started.
    """
    threads = ThreadPoolExecutor(1, name)
    try:
        threads.submit(int).result()
    except RuntimeError as error:
        raise Unsupported(f"the thread {name} cannot be started: {error}") from error
    return threads


def _told(job: Callable[..., JobResult], what: TransferJob, *more: Any) -> JobResult:
    """What a job tells vLLM, which waits for each: that it failed, too."""
    try:
        return job(what, *more)
    except Exception:
        _log.exception("kvpool's tier has failed in the job %d of vLLM's", what.job_id)
        return JobResult(what.job_id, success=False)


def _close(pins: Iterable[_core.KeyedMatch]) -> None:
    """Ends pins, the last first: the end of a prompt is dropped before its beginning."""
    for pin in reversed(list(pins)):
        pin.close()


def _guarded(what: str, call: Callable[[], _T], otherwise: _T) -> _T:
    return guarding.guarded(_log, f"{what} blocks of vLLM's", call, otherwise)
