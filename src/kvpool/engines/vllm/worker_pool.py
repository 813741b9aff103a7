"""The pool of one worker whose scheduler is another process: it copies what plans name by numbers of blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.alloc import block_ids
from kvpool.engines.vllm.engine_pool import EnginePool, wait_for
from kvpool.engines.vllm.hits import Hit
from kvpool.engines.vllm.plans import LoadPlan, SavePlan, StepPlan, WorkerReport
from kvpool.errors import Error, StateError
from kvpool.pool import Pool
from kvpool.ranks import RankArena
from kvpool.types import DRAM

__all__ = ["WorkerPool"]

_log = logging.getLogger("kvpool.engines.vllm")

_JOIN_SECONDS = 5.0  # the scheduler answers at once, or is on another host


class WorkerPool(EnginePool):
    """The worker's side of EnginePool, for plans of a SchedulerIndex. It caches nothing by itself.

    Its memory is that of a rank of the scheduler's pool, as soon as a plan brings the ticket. What it copies before is
    the same: the scheduler names no block that a peer writes or may read.

    Attributes:
        damaged: Numbers of blocks of DRAM that do not hold what the scheduler believes, until another save fills them.
    """

    def __init__(
        self, pool: Pool, blocks: int, stream: Callable[[], Any] | None = None, listen: str | None = None
    ) -> None:
        """Takes all blocks of DRAM, too.

        Args:
            pool: As for EnginePool.
            blocks: As for EnginePool.
            stream: As for EnginePool.
            listen: Where the workers of other engines reach this one, as for `RankArena.join`.
        """
        super().__init__(pool, blocks, stream)
        self._listen = listen
        dram = pool.alloc(pool.stats().dram.capacity, medium=DRAM)
        self._dram = np.empty_like(dram)
        self._dram[block_ids(dram)] = dram
        self.damaged: set[int] = set()
        self._rank: RankArena | None = None
        self._report = WorkerReport()
        self._planned: dict[int, SavePlan] = {}  # saves of the step that have not begun

    def begin_step(self, plan: StepPlan, worker: int) -> None:
        """What the plan says before anything is copied.

        Args:
            plan: Of the step.
            worker: The number of this one.
        """
        for missed in self._planned.values():  # by vLLM, which does not end all its steps at all workers
            self._save_over(missed, well=False)
        self._planned = {save.number: save for save in plan.saves}
        self.suspects -= plan.restored
        self.damaged -= plan.emptied
        if worker in plan.tickets:
            self._join(plan.tickets[worker])

    def take_report(self) -> WorkerReport:
        """What has ended since the last call."""
        self._reap_saves()
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        """As EnginePool.close. Peers end their writes first."""
        if self._rank is not None:
            self._rank.close()
        super().close()

    def begin_save(self, plan: SavePlan) -> None:
        """As EnginePool.begin_save. Earlier saves to the same blocks of DRAM end first.

        Also if this one is refused: the last one says whether the blocks hold what the scheduler believes.
        """
        assert plan.target is not None
        self._planned.pop(plan.number, None)
        self._await_dram(plan.target)
        super().begin_save(plan)

    # ----

    def _join(self, ticket: str) -> None:
        """Gives the scheduler's peers access to the blocks. Without it, they are cached all the same."""
        try:
            self._rank = RankArena.join(
                ticket, memory=self.pool, only_dram=True, listen=self._listen, timeout=_JOIN_SECONDS
            )
        except Error as error:
            _log.warning("this worker's blocks cannot be reached by other engines: %s", error)
        self._report.joins = 1

    def _source(self, plan: LoadPlan) -> tuple[Hit | None, npt.NDArray[np.uint64]]:
        if plan.source is None:
            raise StateError(f"the match of request {plan.request_id} was given up before its load")
        self._await_dram(plan.source)
        if not self.damaged.isdisjoint(plan.source.tolist()):
            raise StateError(f"what request {plan.request_id} is to load was not saved")
        return None, self._dram[plan.source]

    def _copy_out(self, plan: SavePlan) -> _core.BlockCopy:
        assert plan.target is not None
        self.damaged.update(plan.target.tolist())  # until it has ended well
        source = self._addrs[plan.blocks[len(plan.blocks) - len(plan.target) :]]
        return self.pool.copy(source, self._dram[plan.target], stream=self._current_stream(), wait=False)

    def _save_over(self, plan: SavePlan, well: bool) -> None:
        assert plan.target is not None
        self._report.saves[plan.number] = 1
        if well:
            self.damaged.difference_update(plan.target.tolist())
        else:
            self.damaged.update(plan.target.tolist())
            self._report.failed.add(plan.number)

    def _load_failed(self, blocks: npt.NDArray[np.int64], error: Exception) -> None:
        super()._load_failed(blocks, error)
        self._report.unfilled.update(blocks.tolist())

    def _load_over(self, plan: LoadPlan) -> None:
        self._report.loads[plan.number] = 1

    def _await_dram(self, numbers: npt.NDArray[np.int64]) -> None:
        """Waits for saves to these blocks."""
        wanted = set(numbers.tolist())
        for save in self._saves:
            if save.plan.target is not None and not wanted.isdisjoint(save.plan.target.tolist()):
                wait_for(save.copy)
        self._reap_saves()
