"""The scheduler's side where the workers are other processes: which prompt is in which of their blocks of DRAM.

Each worker has its part of every block under the same number. The scheduler says by numbers what to copy, with the plan
of a step; workers report with its output what has ended. So no copy is asked for beside vLLM's own messages, and each
worker orders the copies with its own steps.

The blocks and the prompts are those of a pool whose ranks are the workers: its peers can send to them and fetch from
them. A prompt is cached as soon as its save is planned, as blocks that are still being filled. A later step may load
it: each worker waits for the save then. Peers find it when every worker has saved its part. A worker that could not
says so, and refuses to load these blocks: they are forgotten at once, and free when all workers have reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvpool.alloc import block_ids
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.forgetting import forget_all
from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.hits import Hit, Hits
from kvpool.engines.vllm.plans import LoadPlan, SavePlan, StepPlan, WorkerReport
from kvpool.engines.vllm.requests import Digests
from kvpool.errors import OutOfBlocks, PeerLost
from kvpool.pool import Pool
from kvpool.types import DRAM

__all__ = ["SchedulerIndex"]

_log = logging.getLogger("kvpool.engines.vllm")

_NO_TOKENS = np.empty(0, np.int32)


@dataclass
class _Load:
    hit: Hit
    workers: int  # that have not reported its end


@dataclass
class _Save:
    addrs: npt.NDArray[np.uint64]
    workers: int
    failed: bool = False


class SchedulerIndex:
    """What workers have in DRAM. Not thread-safe: the scheduler's one thread calls it.

    When a worker's connection to the pool is lost, nothing is cached from then on, and vLLM computes.

    Args:
        pool: With ``parallel`` for the workers and ``engine_allocates=True``. It is closed by `close`.

    Attributes:
        pool: The pool.
        suspects: As in EnginePool.
        gaps: As in EnginePool.
        figures: Prompts for which there was no room, since somebody took them.
    """

    def __init__(self, pool: Pool) -> None:
        parallel = pool.ranks.parallel
        assert parallel is not None
        self.pool = pool
        self.suspects: set[int] = set()
        self.gaps: set[str] = set()
        self.figures = Figures()
        self._block_tokens = pool.kv_layout.block_tokens
        self._workers = parallel.ranks
        self._tickets = {rank: pool.ranks.export(rank) for rank in range(self._workers)}  # not sent yet
        self._joining = self._workers  # that have not said whether they have joined
        self._hits = Hits()
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._restored: set[int] = set()
        self._emptied: set[int] = set()
        self._lost = False
        self._last = 0  # number

    # ---- what the planner asks

    def pin(
        self,
        request_id: str,
        tokens: npt.NDArray[np.int32],
        namespace: str,
        groups: Groups,
        ends: Sequence[int] = (),
        digests: Digests | None = None,
    ) -> int:
        """As EnginePool.pin."""
        self.unpin(request_id)
        try:
            return self._hits.find(request_id, tokens, namespace, groups, self.pool.match, ends, digests)
        except PeerLost as error:
            self._lose(error)
            return 0

    def tails(self, request_id: str) -> dict[int, int]:
        """As EnginePool.tails."""
        return self._hits.tails(request_id)

    def note_state(self, name: str, tokens: npt.NDArray[np.int32], begin: int) -> None:
        """As `EnginePool.note_state`: a save of a state was planned."""
        self._hits.note_state(name, tokens, begin)

    def unpin(self, request_id: str) -> None:
        """As EnginePool.unpin."""
        self._hits.close(request_id)

    def rewritten(self, blocks: Iterable[int]) -> None:
        """As EnginePool.rewritten; the workers learn it with the plan of the step."""
        restored = self.suspects.intersection(blocks)
        self._restored |= restored
        self.suspects -= restored

    @property
    def saving(self) -> bool:
        """Whether a worker may be saving."""
        return bool(self._saves)

    def clear(self) -> bool:
        """Drops all that is cached. What a load or a peer still needs is not found any more, and makes room later."""
        self._hits.close_all()
        try:
            for save in self._saves.values():
                self.pool.forget(save.addrs)
            for load in self._loads.values():
                self.pool.forget(load.hit.match.addrs)
            forget_all(self.pool)
        except PeerLost as error:
            self._lose(error)
        return True

    def take_figures(self) -> Figures:
        """What happened since the last call."""
        taken, self.figures = self.figures, Figures()
        return taken

    def close(self) -> None:
        """Closes the pool."""
        self._hits.close_all()
        for load in self._loads.values():
            load.hit.close()
        self._loads.clear()
        self.pool.close()

    # ---- plans and reports

    def addressed(self, step: StepPlan) -> StepPlan:
        """The plan of a step as workers need it: with the numbers of blocks in place of tokens and matches."""
        loads = [self._load(plan) for plan in step.loads]
        saves = [save for plan in step.saves if (save := self._save(plan)) is not None]
        addressed = StepPlan(loads, saves, step.written, self._restored, emptied=self._emptied, tickets=self._tickets)
        self._restored, self._emptied, self._tickets = set(), set(), {}
        return addressed

    def reported(self, report: WorkerReport) -> None:
        """Takes what has ended at workers."""
        self._joining -= report.joins
        self.suspects |= report.unfilled
        for number, workers in report.loads.items():
            load = self._loads.get(number)
            if load is None:
                continue
            load.workers -= workers
            if load.workers <= 0:
                del self._loads[number]
                load.hit.close()
        for number, workers in report.saves.items():
            save = self._saves.get(number)
            if save is None:
                continue
            save.workers -= workers
            if save.workers <= 0:
                del self._saves[number]
            try:
                self._saved(save, number in report.failed)
            except PeerLost as error:
                self._lose(error)

    # ----

    def _load(self, plan: LoadPlan) -> LoadPlan:
        hit = self._hits.take(plan.request_id, plan.group)
        self.suspects.difference_update(plan.blocks.tolist())  # until it fails
        self._last += 1
        if hit is None:
            return replace(plan, number=self._last)
        source = hit.addrs(plan.first, len(plan.blocks))
        if source is None:
            hit.close()
            return replace(plan, number=self._last)
        self._loads[self._last] = _Load(hit, self._workers)
        return replace(plan, number=self._last, source=block_ids(source))

    def _save(self, plan: SavePlan) -> SavePlan | None:
        """None if all is cached, or nothing can make room."""
        try:
            addrs = self._insert(plan)
        except OutOfBlocks:
            self.figures.add(failed_saves=1)
            return None
        except PeerLost as error:
            self._lose(error)
            return None
        if not len(addrs):
            return None
        self._last += 1
        self._saves[self._last] = _Save(addrs, self._workers)
        return replace(plan, number=self._last, target=block_ids(addrs), tokens=_NO_TOKENS)

    def _insert(self, plan: SavePlan) -> npt.NDArray[np.uint64]:
        """Caches what is not cached of a prompt, in blocks that are to be filled. Returns these."""
        with self.pool.match(plan.tokens, plan.namespace) as hit:
            cached_blocks = hit.tokens // self._block_tokens
            missing = plan.first + len(plan.blocks) - cached_blocks
            if not missing:
                return hit.addrs[:0]
            if cached_blocks < plan.first:  # what vLLM no longer has is not cached any more
                self.figures.add(failed_saves=1)
                self.gaps.add(plan.request_id)
                return hit.addrs[:0]
            addrs = self.pool.alloc(missing, medium=DRAM)
            cached = np.concatenate([hit.addrs, addrs])
            with self.pool.insert(plan.tokens, cached, plan.namespace, filled=False) as held:
                if len(held.duplicates):  # a peer has sent the same meanwhile
                    self.pool.free(held.duplicates)
                return held.addrs[len(held.addrs) - held.inserted :]

    def _saved(self, save: _Save, failed: bool) -> None:
        """Some workers have ended a save, and one of them may have failed."""
        if failed and not save.failed:
            save.failed = True
            self.pool.forget(save.addrs)
        if save.workers <= 0:
            self.pool.filled(save.addrs)
            if save.failed:
                self._emptied.update(block_ids(save.addrs).tolist())

    def _lose(self, error: PeerLost) -> None:
        if not self._lost:
            _log.warning("a worker is lost to the cache, and all is computed from now on: %s", error)
        self._lost = True
