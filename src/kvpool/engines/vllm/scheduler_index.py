"""The scheduler's side where the workers are other processes: which prompt is in which of their blocks of DRAM.

Each worker has its part of every block under the same number. The scheduler says by numbers what to copy, with the plan
of a step; workers report with its output what has ended. So nothing is sent beside vLLM's own messages, and each worker
orders the copies with its own steps.

A prompt is in the index as soon as its save is planned. A later step may load it, or save something else to the same
blocks: each worker waits for the save then. A worker that could not save says so, refuses to load these blocks, and the
prompt is forgotten: at once, or, while a load has it pinned, when that has ended. Until then nobody finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.plans import LoadPlan, SavePlan, StepPlan, WorkerReport
from kvpool.errors import StateError
from kvpool.index import PromptIndex

__all__ = ["SchedulerIndex"]

_NO_TOKENS = np.empty(0, np.int32)


@dataclass
class _Load:
    hit: _core.Match
    workers: int  # that have not reported its end


@dataclass
class _Save:
    plan: SavePlan
    workers: int
    failed: bool = False


class SchedulerIndex:
    """What workers have in DRAM. Not thread-safe: the scheduler's one thread calls it.

    Args:
        block_tokens: Tokens in a block.
        dram_blocks: Blocks of DRAM, numbered from 0, that every worker has.
        workers: How many there are.

    Attributes:
        index: From prompts to numbers of blocks.
        suspects: As in EnginePool.
        figures: Prompts for which there was no room, since somebody took them.
    """

    def __init__(self, block_tokens: int, dram_blocks: int, workers: int) -> None:
        self.index = PromptIndex(block_tokens)
        self.suspects: set[int] = set()
        self.figures = Figures()
        self._block_tokens = block_tokens
        self._workers = workers
        self._free = list(range(dram_blocks - 1, -1, -1))
        self._hits: dict[str, _core.Match] = {}
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._restored: set[int] = set()
        self._doomed: dict[int, SavePlan] = {}  # saves that failed, and that cannot be forgotten yet
        self._epoch = 0  # of the cache; what was cached in earlier ones is never found
        self._last = 0  # number

    # ---- what the planner asks

    def pin(self, request_id: str, tokens: npt.NDArray[np.int32], namespace: str) -> int:
        """As EnginePool.pin."""
        self.unpin(request_id)
        hit = self.index.match(tokens, self._name(namespace))
        sound = self._sound(hit)
        if sound < hit.tokens:
            hit.close()
            hit = self.index.match(tokens[:sound], self._name(namespace))
        if not hit.tokens:
            hit.close()
            return 0
        self._hits[request_id] = hit
        return hit.tokens

    def unpin(self, request_id: str) -> None:
        """As EnginePool.unpin."""
        hit = self._hits.pop(request_id, None)
        if hit is not None:
            hit.close()

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
        """Drops all that is cached. What a load still needs is not found any more, and makes room later."""
        for request_id in list(self._hits):
            self.unpin(request_id)
        self._epoch += 1
        self._evict(len(self.index))
        return True

    # ---- plans and reports

    def addressed(self, step: StepPlan) -> StepPlan:
        """The plan of a step as workers need it: with the numbers of blocks in place of tokens and matches."""
        self._forget_doomed()
        loads = [self._load(plan) for plan in step.loads]
        saves = [save for plan in step.saves if (save := self._save(plan)) is not None]
        restored, self._restored = self._restored, set()
        return StepPlan(loads, saves, step.written, restored)

    def reported(self, report: WorkerReport) -> None:
        """Takes what has ended at workers."""
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
            if number in report.failed and not save.failed:
                save.failed = True
                self._doomed[number] = save.plan
            save.workers -= workers
            if save.workers <= 0:
                del self._saves[number]
        self._forget_doomed()

    # ----

    def _load(self, plan: LoadPlan) -> LoadPlan:
        hit = self._hits.pop(plan.request_id, None)
        self.suspects.difference_update(plan.blocks.tolist())  # until it fails
        self._last += 1
        if hit is None:
            return replace(plan, number=self._last)
        self._loads[self._last] = _Load(hit, self._workers)
        source = hit.addrs[plan.first : plan.first + len(plan.blocks)].astype(np.int64)
        return replace(plan, number=self._last, source=source)

    def _save(self, plan: SavePlan) -> SavePlan | None:
        """None if all is cached, or nothing can make room."""
        plan = replace(plan, namespace=self._name(plan.namespace))
        with self.index.match(plan.tokens, plan.namespace) as hit:
            if self._sound(hit) < hit.tokens:
                return None  # it is to be forgotten first
            missing = len(plan.blocks) - hit.tokens // self._block_tokens
            if missing == 0:
                return None
            if missing > len(self._free):
                self._evict(missing - len(self._free))
            if missing > len(self._free):
                self.figures.add(failed_saves=1)
                return None
            target = np.array([self._free.pop() for _ in range(missing)], np.int64)
            values = np.concatenate([hit.addrs, target.astype(np.uint64)])
            self.index.insert(plan.tokens, values, plan.namespace).close()
        self._last += 1
        addressed = replace(plan, number=self._last, target=target)
        self._saves[self._last] = _Save(addressed, self._workers)
        return replace(addressed, tokens=_NO_TOKENS)

    def _name(self, namespace: str) -> str:
        return f"{self._epoch}:{namespace}"

    def _sound(self, hit: _core.Match) -> int:
        """The tokens of a match before the first block that some worker could not save."""
        if self._doomed:
            wrong = np.concatenate([plan.target for plan in self._doomed.values() if plan.target is not None])
            found = np.flatnonzero(np.isin(hit.addrs, wrong.astype(np.uint64)))
            if len(found):
                return int(found[0]) * self._block_tokens
        return hit.tokens

    def _forget_doomed(self) -> None:
        self._doomed = {number: plan for number, plan in self._doomed.items() if not self._forget(plan)}

    def _forget(self, plan: SavePlan) -> bool:
        """Drops what was to be saved, and what continues it. False while it is in use."""
        assert plan.target is not None
        before = len(plan.blocks) - len(plan.target)
        prefix = plan.tokens[: before * self._block_tokens]
        with self.index.match(plan.tokens, plan.namespace) as hit:
            kept, there = hit.addrs[:before], hit.addrs[before:]
        if not np.isin(there, plan.target.astype(np.uint64)).any():
            return True  # it was dropped meanwhile, and what is cached now was saved anew
        try:
            gone = self.index.delete(plan.tokens, plan.namespace, descendants=True)
        except StateError:
            return False
        if np.isin(kept, gone).any():  # nothing else begins with the prefix
            self.index.insert(prefix[: len(kept) * self._block_tokens], kept, plan.namespace).close()
        self._free += np.setdiff1d(gone, kept).astype(np.int64).tolist()
        return True

    def _evict(self, blocks: int) -> None:
        self._free += self.index.evict(blocks).astype(np.int64).tolist()
