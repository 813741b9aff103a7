"""vLLM's interface to a cache of KV blocks (``KVConnectorBase_V1``), over the pools of the engine.

vLLM makes one of these beside its scheduler, and one in each worker. This module translates; what it calls decides.
Where the one worker is in the scheduler's process, both sides share a pool; otherwise the scheduler has an index, and
each worker a pool with its part of every block.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import vllm

from kvpool.engines.logs import log_as
from kvpool.engines.versions import check_version
from kvpool.engines.vllm import TESTED

check_version("vLLM", vllm.__version__, TESTED)  # before the imports that another release may lack

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.executor.abstract import Executor  # noqa: E402
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: E402
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

from kvpool.engines import packing  # noqa: E402
from kvpool.engines.vllm import pools_here, sleeping  # noqa: E402
from kvpool.engines.vllm.engine_pool import EnginePool  # noqa: E402
from kvpool.engines.vllm.expected import Expected  # noqa: E402
from kvpool.engines.vllm.figures import Figures  # noqa: E402
from kvpool.engines.vllm.groups import Groups, places_of  # noqa: E402
from kvpool.engines.vllm.layouts import pages_of  # noqa: E402
from kvpool.engines.vllm.member_index import MemberIndex  # noqa: E402
from kvpool.engines.vllm.member_pool import MemberPool  # noqa: E402
from kvpool.engines.vllm.members import Membership  # noqa: E402
from kvpool.engines.vllm.metadata import Joined, StepMetadata, WorkerMetadata  # noqa: E402
from kvpool.engines.vllm.metrics import KvpoolPromMetrics, KvpoolStats  # noqa: E402
from kvpool.engines.vllm.options import Options  # noqa: E402
from kvpool.engines.vllm.outgoing import Outgoing  # noqa: E402
from kvpool.engines.vllm.owned import OwnedBlocks  # noqa: E402
from kvpool.engines.vllm.planner import Planner  # noqa: E402
from kvpool.engines.vllm.plans import StepPlan  # noqa: E402
from kvpool.engines.vllm.pool_making import join, packing_here, pool_of_workers, pool_over  # noqa: E402
from kvpool.engines.vllm.pulls import Pulls  # noqa: E402
from kvpool.engines.vllm.reported_events import ReportedEvents, wanted  # noqa: E402
from kvpool.engines.vllm.scheduler_index import SchedulerIndex  # noqa: E402
from kvpool.engines.vllm.supported import (  # noqa: E402
    check_alone,
    check_by_layer,
    check_shared,
    check_stages,
    check_supported,
)
from kvpool.engines.vllm.worker_pool import WorkerPool  # noqa: E402
from kvpool.errors import StateError  # noqa: E402
from kvpool.pool import Pool  # noqa: E402
from kvpool.types import KVLayout  # noqa: E402

__all__ = ["KvpoolConnector"]

_log = logging.getLogger("kvpool.engines.vllm")


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps computed blocks in DRAM, and brings them back. vLLM makes it; see docs/how-to/vllm.md.

    Raises:
        Unsupported: Layers that keep anything but K and V or states at the ends of blocks; groups of layers with blocks
            of unequal sizes, and with unequal pages in a cluster; workers on several machines, or stages of a pipeline
            with groups of layers, in a cluster; context parallelism; sleep mode with the route ucx.
        ArgumentError, ArgumentTypeError: ``kv_connector_extra_config`` is wrong.
        OutOfMemory: The machine does not have the memory for the cache.
        LayoutMismatch: vLLM's tensors are not what its configuration says.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        log_as("vllm")  # which vLLM has configured by now
        transfer = self._kv_transfer_config
        parallel = vllm_config.parallel_config
        self._engine_id: str = transfer.engine_id
        self._options = Options.parse(transfer.kv_connector_extra_config).of_engine(self._engine_id)
        # With steps in flight ahead of their outputs, vLLM would compute on what a failed load has left.
        self._async_load = self._options.async_load or vllm_config.max_concurrent_batches > 1
        check_supported(vllm_config, self._options)
        self._workers: int = parallel.world_size
        self._rank: int = parallel.rank
        self._one_process = parallel.world_size == 1 and issubclass(Executor.get_class(vllm_config), UniProcExecutor)
        check_by_layer(self._options, self._one_process, parallel)
        pages = self._pages = pages_of(kv_cache_config)
        check_stages(self._pages, self._options, parallel.pipeline_parallel_size)
        check_alone(self._pages, self._options)
        # Alone, the stages of a pipeline have other layers in the groups, and nobody to compare them with.
        places = places_of(self._pages.groups) if self._options.cluster else ""
        self._groups = Groups(pages.block_tokens, pages.windows, bool(self._options.cluster), places, pages.states)
        if self._pages.begins_anew:
            self._async_load = True  # of failures of other loads vLLM hears by their blocks alone
        self._places = {  # of each layer: its group, and its place in the group's blocks
            name: (group, place)
            for group, names in enumerate(self._pages.groups or (self._pages.layers,))
            for place, name in enumerate(names)
        }
        self._engine: EnginePool | None = None
        self._index: SchedulerIndex | None = None
        self._planned: Planner | None = None
        self._events: ReportedEvents | None = None
        if role == KVConnectorRole.SCHEDULER:
            # vLLM reads this next. What a cache has lost can be computed; vLLM's default fails the request.
            transfer.kv_load_failure_policy = "recompute"
        if role == KVConnectorRole.SCHEDULER and self._one_process:
            # The worker is made first, and has registered its tensors.
            self._engine = pools_here.find(self._engine_id)
            if self._engine is None:
                raise StateError("no worker has registered its blocks in the scheduler's process")
            self._planned = self._planner_over(self._engine)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved is computed again: nothing depends on it."""
        return False

    # ---- the scheduler's side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learns which workers there are, where they are other processes. VLLM calls it in any case."""
        if self._one_process:
            return
        if len(metadata) != self._workers:
            raise StateError(f"{len(metadata)} of {self._workers} workers have registered their blocks")
        parts = [metadata[rank] for rank in sorted(metadata)]  # by stage, then by tensor-parallel rank
        heads = 1 if self._pages.latent else self._vllm_config.model_config.get_total_num_kv_heads()
        tp = self._vllm_config.parallel_config.tensor_parallel_size
        dram_blocks = min(part.dram_blocks for part in parts)
        layouts = [part.layout for part in parts]
        pool = pool_of_workers(self._pages, self._options, layouts, dram_blocks, tp, heads)
        packed = packing.joined(part.packing for part in parts)
        packing.declare(pool, packed, self._groups.mark)  # before it is a member
        if self._options.cluster:
            self._index = MemberIndex(pool, self._join(pool), self._options.transfer_timeout_s, len(self._groups))
        else:
            self._index = SchedulerIndex(pool)
        self._planned = self._planner_over(self._index)

    def on_new_request(self, request: Any) -> None:
        """Remembers it."""
        self._planner.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` are cached, and whether they are loaded beside steps."""
        return self._planner.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load."""
        if num_external_tokens:
            self._planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The plan of the step."""
        state = scheduler_output.kv_connector_block_state
        plan = self._planner.plan(
            scheduler_output.num_scheduled_tokens,
            state.get_block_ids,
            bool(scheduler_output.kv_cache_block_copies),
        )
        return StepMetadata(plan if self._index is None else self._index.addressed(plan))

    def update_connector_output(self, connector_output: Any) -> None:
        """Learns which loads have failed, and what has ended at workers."""
        if self._index is not None and connector_output.kv_connector_worker_meta:
            self._index.reported(connector_output.kv_connector_worker_meta.report)
        if connector_output.invalid_block_ids:
            self._planner.failed(connector_output.invalid_block_ids)
        if connector_output.failed_recving:
            self._planner.failed_loads(connector_output.failed_recving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """VLLM may free the blocks at once: the step that writes to them next waits for what still reads them."""
        answer = self._planner.answer(request.request_id)
        self._planner.finish(request.request_id)
        return False, answer

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        """Whether prompts are being sent, or will be: vLLM goes on with steps until that has ended."""
        if isinstance(self._index, MemberIndex):
            return self._index.has_work
        return isinstance(self._engine, MemberPool) and self._engine.sending

    def take_events(self) -> Iterable[Any]:
        """Which blocks were cached and dropped since the last call, as events of the medium CPU."""
        return [] if self._events is None else self._events.take()

    def reset_cache(self) -> bool:
        """Drops all that is cached. False if something is still in use."""
        return self._planner.reset()

    # ---- the worker's side

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """In what vLLM allocates its blocks; None: as without a connector."""
        return OwnedBlocks() if self._options.own_blocks else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Makes the pool over vLLM's tensors."""
        check_shared(self._pages, kv_caches)
        device = kv_caches[self._pages.layers[0]].device
        pool = pool_over(self._pages, self._options, kv_caches, self._workers, apart=not self._one_process)
        packing.declare(pool, packing_here(self._pages, self._vllm_config), self._groups.mark)
        stream = (lambda: torch.cuda.current_stream(device)) if device.type == "cuda" else None
        if not self._one_process:
            self._engine = WorkerPool(pool, self._pages.blocks, stream, self._options.worker_listen)
        else:
            if self._options.cluster:  # it must be a member before it adopts blocks
                timeout_s = self._options.transfer_timeout_s
                self._engine = MemberPool(
                    pool, self._pages.blocks, self._join(pool), timeout_s, stream, len(self._groups)
                )
            else:
                self._engine = EnginePool(pool, self._pages.blocks, stream)
            pools_here.attach(self._engine_id, self._engine)
        if self._vllm_config.model_config.enable_sleep_mode:
            sleeping.follow(self._vllm_config.model_config.sleep_mode_backend, self._engine, pool.settings.routes)
        _log.info("vLLM's %d blocks are on kvpool: %s", self._pages.blocks, pool)

    def get_handshake_metadata(self) -> Joined | None:
        """What the scheduler must know of this worker, if it is another process."""
        if not isinstance(self._engine, WorkerPool):
            return None
        pool = self._engine.pool
        assert isinstance(pool.kv_layout, KVLayout)
        return Joined(pool.kv_layout, pool.stats().dram.capacity, packing_here(self._pages, self._vllm_config))

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Called before each step: waits for the saves whose blocks the step writes."""
        engine = self._worker()
        if isinstance(engine, MemberPool):
            engine.begin_step()
        engine.await_saves_of(kv_connector_metadata.plan.written)
        if isinstance(engine, WorkerPool):
            engine.begin_step(kv_connector_metadata.plan, self._rank)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Carries out the step's loads; vLLM calls it before the step if one of them must be done by then."""
        engine = self._worker()
        for load in self._step().loads:
            if self._async_load:
                engine.begin_load(load)
            else:
                engine.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are of all layers, and done."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Sends the layer, if prompts are sent by layer. Blocks are saved when all layers are computed."""
        if not self._options.by_layer or layer_name not in self._places:
            return
        group, place = self._places[layer_name]
        engine, sends = self._worker(), [send for send in self._step().sends if send.group == group]
        if sends and isinstance(engine, MemberPool):
            engine.layer_computed(place, sends)

    def wait_for_save(self) -> None:
        """Begins the step's sends and saves; threads of the pool copy while the next step computes."""
        engine = self._worker()
        if isinstance(engine, MemberPool):
            for send in self._step().sends:
                engine.send(send)
        for save in self._step().saves:
            engine.begin_save(save)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose asynchronous loads have ended."""
        return None, (self._worker().take_ended_loads() if self._async_load else None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As get_finished, and the requests that begin anew because their loads have failed."""
        ended = self.get_finished(finished_req_ids)[1] or set()
        failed = self._worker().take_failed_loads(ended)
        return KVConnectorTransferResults(
            finished_recving=ended, failed_recving=failed if self._pages.begins_anew else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that loads did not fill; vLLM computes from them on, or hears of the request instead."""
        failed = self._worker().take_failed_blocks()
        return set() if self._pages.begins_anew else failed

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """What has ended here, for a scheduler in another process."""
        if not isinstance(self._engine, WorkerPool):
            return None
        report = self._engine.take_report()
        return WorkerMetadata(report) if report else None

    def get_kv_connector_stats(self) -> KvpoolStats | None:
        """What happened since the last call. vLLM adds up what workers say, and each copies its part of all tokens."""
        if self._index is not None:
            figures = self._index.take_figures()
        elif self.role != KVConnectorRole.WORKER:
            return None
        else:
            figures = self._worker().take_figures()
            if self._rank:
                figures = Figures({name: value for name, value in figures.items() if name.startswith("failed")})
        return KvpoolStats(data=dict(figures)) if figures else None

    def shutdown(self) -> None:
        """Closes the pool; the first side that is shut down does it."""
        if self._one_process:
            pools_here.detach(self._engine_id)
        elif self._engine is not None:
            self._engine.close()
        elif self._index is not None:
            self._index.close()

    # ---- the class

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvpoolStats:
        """Of a dict that came from the worker."""
        return KvpoolStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvpoolPromMetrics:
        """Counters for Prometheus."""
        return KvpoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are sent between layers, if the options say so."""
        return bool(extra_config.get("by_layer"))

    # ----

    @property
    def _planner(self) -> Planner:
        if self._planned is None:
            raise StateError("the workers have not registered their blocks yet")
        return self._planned

    def _planner_over(self, engine: EnginePool | SchedulerIndex) -> Planner:
        transfer = self._kv_transfer_config
        consumes, produces = transfer.is_kv_consumer, transfer.is_kv_producer
        expected = outgoing = pulls = None
        if isinstance(engine, MemberPool | MemberIndex):
            expected = Expected(engine, self._options.transfer_timeout_s) if consumes else None
            outgoing = Outgoing(engine, engine.name, self._groups) if produces else None
            pulls = Pulls(engine, self._options.transfer_timeout_s, self._options.pull, groups=self._groups)
            consumes = produces = True  # the role says what goes to others; each has its cache
        if wanted(self._vllm_config) and not any(self._pages.states):
            self._events = ReportedEvents(self._vllm_config, engine.pool)
        return Planner(
            engine,
            self._pages.block_tokens,
            loads=consumes,
            saves=produces,
            groups=self._groups,
            async_load=self._async_load,
            expected=expected,
            outgoing=outgoing,
            pulls=pulls,
            on_save=None if self._events is None else self._events.saving,
        )

    def _join(self, pool: Pool) -> Membership:
        return join(pool, self._options, self._vllm_config, self._engine_id)

    def _worker(self) -> EnginePool:
        if self._engine is None:
            raise StateError("vLLM has not registered its KV tensors yet")
        return self._engine

    def _step(self) -> StepPlan:
        plan: StepPlan = self._get_connector_metadata().plan
        return plan
