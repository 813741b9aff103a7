"""The engine of vllm_kit with two workers in other processes: what goes between them and the scheduler is pickled."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import replace
from typing import Any

from engines.vllm_kit import LAYOUT, Engine

import kvpool
from kvpool import ParallelConfig
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.options import Options
from kvpool.engines.vllm.plans import StepPlan, WorkerReport
from kvpool.engines.vllm.scheduler_index import SchedulerIndex
from kvpool.engines.vllm.worker_pool import WorkerPool


def sent(what: Any) -> Any:
    return pickle.loads(pickle.dumps(what))


def scheduler_pool(blocks: int, dram_blocks: int, workers: int, **more: Any) -> kvpool.Pool:
    """Of blocks of which each worker has its heads."""
    return kvpool.Pool(
        replace(LAYOUT, kv_heads=LAYOUT.kv_heads * workers), hbm_blocks=blocks, dram_blocks=dram_blocks,
        parallel=ParallelConfig(tp=workers), engine_allocates=True, audit=True, **Options(**more).settings,
    )  # fmt: skip


def index_of(blocks: int, dram_blocks: int, workers: int) -> SchedulerIndex:
    return SchedulerIndex(scheduler_pool(blocks, dram_blocks, workers))


class Pools:
    """What tests of one pool ask, answered for an index and the pools of two workers. Failures are the second one's."""

    def __init__(self, index: SchedulerIndex, pools: list[Any]):
        self._pool, self.workers = index.pool, pools
        self.explain_match = self._pool.explain_match

    def finish_all(self) -> None:
        for pool in self.workers:
            pool.finish_all()

    def evict(self, n: int, medium: int) -> int:
        return self._pool.evict(n, medium)

    def stats(self) -> Any:
        return self._pool.stats()

    @property
    def fail_loads(self) -> list[str]:
        return self.workers[1].fail_loads

    @fail_loads.setter
    def fail_loads(self, how: list[str]) -> None:
        self.workers[1].fail_loads = how

    def audit(self) -> None:
        self._pool.audit()
        for pool in self.workers:
            pool.audit()


class HeldWorker(WorkerPool):
    """Its copies are those of a HeldPool, and its memory is that of the pool below."""

    def _join(self, ticket: str) -> None:
        held, self.pool = self.pool, self.pool._pool
        super()._join(ticket)
        self.pool = held


class ApartEngine(Engine):
    """As vllm_kit's, but the last worker's output comes with all reports, as vLLM's executor has it."""

    deaf: frozenset[int] = frozenset()  # workers that vLLM does not tell of the end of a step
    count = 2  # of workers
    _listen: str | None = None
    late = 0  # reports come so many steps later, as with several steps in flight

    def _make(self, blocks: int, dram_blocks: int, held: bool) -> Any:
        pools = [self._new_pool(blocks, dram_blocks, held) for _ in range(self.count)]
        self.workers = [HeldWorker(pool, blocks, None, self._listen) for pool in pools]
        self.index = self._new_index(blocks, dram_blocks, len(pools))
        self.pool = Pools(self.index, pools)
        self.engine = self
        self._ended: dict[str, int] = {}
        self._reports: deque[WorkerReport] = deque()
        return self.index

    def _new_index(self, blocks: int, dram_blocks: int, workers: int) -> SchedulerIndex:
        return index_of(blocks, dram_blocks, workers)

    def _execute(self, step: StepPlan, counts: dict[str, int]) -> tuple[set[str], set[int]]:
        plan = self.index.addressed(step)
        plans = [sent(plan) for _ in self.workers]
        for number, (worker, mine) in enumerate(zip(self.workers, plans, strict=True)):
            worker.begin_step(mine, number)
            self._begin(worker, mine)
        for request_id, count in counts.items():
            self._compute(self.requests[request_id], count)
        report, failed = WorkerReport(), set()
        for number, (worker, mine) in enumerate(zip(self.workers, plans, strict=True)):
            for save in mine.saves if number not in self.deaf else []:
                worker.begin_save(save)
            for request_id in worker.take_ended_loads():
                self._ended[request_id] = self._ended.get(request_id, 0) + 1
            failed |= worker.take_failed_blocks()
            report.add(sent(worker.take_report()))
        self._reports.append(report)
        while len(self._reports) > self.late:
            self.index.reported(self._reports.popleft())
        ended = {request_id for request_id, workers in self._ended.items() if workers == len(self.workers)}
        for request_id in ended:
            del self._ended[request_id]
        return ended, failed

    def take_figures(self) -> Figures:
        """Of the first worker; of the others only failures."""
        figures, *others = (worker.take_figures() for worker in self.workers)
        for other in others:
            figures.merge({name: value for name, value in other.items() if name.startswith("failed")})
        figures.merge(self.index.take_figures())
        return figures

    def close(self) -> None:
        self.pool.finish_all()
        for worker in self.workers:
            worker.take_report()
            assert not worker.damaged or not self.index._saves
        self.pool.audit()
        for worker in self.workers:
            worker.close()
        self.index.close()
