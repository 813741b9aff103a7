"""The pool of one engine, and the copies that are under way between it and vLLM's blocks.

All of vLLM's blocks are adopted once, since its allocator does not ask anybody before it uses a block again. So one
rule is kept here that the pool cannot keep: nothing writes to a block while a save reads it. A step names the blocks
that it writes, and `await_saves_of` waits for the saves that read one of them. A running request's whole blocks are not
written, and vLLM reuses the blocks that were freed last after all others, so in practice nothing waits.

The scheduler's side and the worker's side share this object where both are in one process. Otherwise the scheduler has
a `SchedulerIndex`, and each worker a `WorkerPool`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines.sleep import resume_adopted, suspend_adopted
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.forgetting import forget_all
from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.hits import Hit, Hits
from kvpool.engines.vllm.plans import LoadPlan, SavePlan
from kvpool.engines.vllm.requests import Digests
from kvpool.errors import DeadlineExceeded, Error, OutOfBlocks, StateError
from kvpool.pool import Pool

__all__ = ["EnginePool", "wait_for"]

_log = logging.getLogger("kvpool.engines.vllm")

_SUSPEND_SECONDS = 10.0  # for what peers still read or write; vLLM has no requests then


@dataclass
class _Save:
    copy: _core.BlockCopy
    blocks: frozenset[int]
    plan: SavePlan


@dataclass
class _Load:
    copy: _core.BlockCopy
    hit: Hit | None
    plan: LoadPlan
    began: float


class EnginePool:
    """The pool of an engine. Not thread-safe: the engine's one thread schedules and executes.

    Attributes:
        pool: The pool.
        figures: What happened since somebody took them.
        suspects: vLLM's blocks with wrong content, after a load failed, until they are written again.
        gaps: Requests of which a group cannot be saved any more, because blocks before its window are not cached. The
            planner takes them.
    """

    def __init__(self, pool: Pool, blocks: int, stream: Callable[[], Any] | None = None) -> None:
        """Adopts all blocks.

        Args:
            pool: With ``engine_allocates=True``. It is closed by `close`.
            blocks: How many vLLM has.
            stream: Returns the CUDA stream whose work writes and reads the blocks; None on a CPU.
        """
        self.pool = pool
        self.figures = Figures()
        self.suspects: set[int] = set()
        self.gaps: set[str] = set()
        self._block_tokens = pool.kv_layout.block_tokens
        self._addrs = pool.adopt(np.arange(blocks))
        self._stream = stream
        self._hits = Hits()
        self._saves: list[_Save] = []
        self._loads: dict[tuple[str, int], _Load] = {}  # by request and group
        self._failed_blocks: set[int] = set()
        self._failed_loads: set[str] = set()  # requests
        self._ended_loads: set[str] = set()

    # ---- the scheduler's side

    def pin(
        self,
        request_id: str,
        tokens: npt.NDArray[np.int32],
        namespace: str,
        groups: Groups,
        ends: Sequence[int] = (),
        digests: Digests | None = None,
    ) -> int:
        """Looks a prompt up, and pins what is cached of it until `unpin` or the end of its loads.

        Args:
            request_id: Of the request; what it has pinned before is unpinned.
            tokens: Of the prompt.
            namespace: Of the request.
            groups: Of the model's layers.
            ends: As for `Hits.find`.
            digests: Likewise.

        Returns:
            The tokens that are cached for every group.
        """
        self.unpin(request_id)
        return self._hits.find(request_id, tokens, namespace, groups, self.pool.match, ends, digests)

    def tails(self, request_id: str) -> dict[int, int]:
        """As `Hits.tails`, of what is pinned."""
        return self._hits.tails(request_id)

    def note_state(self, name: str, tokens: npt.NDArray[np.int32], begin: int) -> None:
        """As `Hits.note_state`: a save of a state was planned."""
        self._hits.note_state(name, tokens, begin)

    def rewritten(self, blocks: Iterable[int]) -> None:
        """The step computes these blocks anew."""
        self.suspects.difference_update(blocks)

    def unpin(self, request_id: str) -> None:
        """Ends the pin of a request, if it has one that no load has taken."""
        self._hits.close(request_id)

    @property
    def saving(self) -> bool:
        """Whether a save is under way."""
        self._reap_saves()
        return bool(self._saves)

    def clear(self) -> bool:
        """Waits for all copies, and drops all that is cached. False: a peer still reads what nobody finds any more."""
        self._await_all()
        self._hits.close_all()
        forget_all(self.pool)
        return self.pool.stats().dram.historical == 0

    # ---- the worker's side

    def await_saves_of(self, written: set[int] | None) -> None:
        """Waits for the saves that read one of the blocks. REQUIRES: before anything writes to them."""
        waiting = [save for save in self._saves if written is None or not save.blocks.isdisjoint(written)]
        if waiting:
            self._await(waiting)

    def load(self, plan: LoadPlan) -> None:
        """Loads, and returns when the blocks are filled. A failure is told by `take_failed_blocks`."""
        self._copy_in(plan, wait=True)

    def begin_load(self, plan: LoadPlan) -> None:
        """Begins to load. `take_ended_loads` tells the end, also of a load that could not begin."""
        if not self._copy_in(plan, wait=False):
            self._ended_loads.add(plan.request_id)
            self._failed_loads.add(plan.request_id)

    def take_ended_loads(self) -> set[str]:
        """The requests whose `begin_load` has ended, well or not, since the last call."""
        self._reap_loads()
        ended = self._ended_loads - {request_id for request_id, _ in self._loads}
        self._ended_loads -= ended
        return ended

    def take_failed_loads(self, ended: set[str]) -> set[str]:
        """Which of these requests have a load that failed."""
        failed = self._failed_loads & ended
        self._failed_loads -= ended
        return failed

    def take_failed_blocks(self) -> set[int]:
        """VLLM's blocks that loads should have filled and did not, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def begin_save(self, plan: SavePlan) -> None:
        """Begins to save what is not cached of a prompt. Raises nothing for lack of room: then it is not cached."""
        blocks = frozenset(plan.blocks.tolist())
        if not self.suspects.isdisjoint(blocks):
            self._save_over(plan, well=False)
            return
        try:
            copy = self._copy_out(plan)
        except Error as error:
            self._save_failed(plan, error)
            return
        self._saves.append(_Save(copy, blocks, plan))

    def suspend(self) -> bool:
        """VLLM unmaps its blocks next: waits for all that reads or writes them. Idempotent.

        Returns:
            Whether the pool is suspended by this call: False if it was before, or is closed.

        Raises:
            Busy, StateError: A peer still has some of them. Then nothing is changed.
        """
        self._await_all()
        return suspend_adopted(self.pool, self._addrs, _SUSPEND_SECONDS)

    def resume(self) -> None:
        """VLLM has its blocks again, at the same addresses and with any content. Idempotent."""
        resume_adopted(self.pool, self._addrs)

    def take_figures(self) -> Figures:
        """What happened since the last call."""
        self._reap_saves()
        taken, self.figures = self.figures, Figures()
        return taken

    def close(self) -> None:
        """Closes the pool. Copies under way end first, since vLLM frees its tensors next."""
        if self.pool.closed:
            return
        for copy in [*(save.copy for save in self._saves), *(load.copy for load in self._loads.values())]:
            wait_for(copy)
        loading = [load.hit for load in self._loads.values() if load.hit is not None]
        self._hits.close_all()
        for hit in loading:
            hit.close()
        self._saves.clear()
        self._loads.clear()
        self.pool.close()

    # ----

    def _await_all(self) -> None:
        for save in self._saves:
            wait_for(save.copy)
        for load in self._loads.values():
            wait_for(load.copy)
        self._reap_saves()
        self._reap_loads()

    def _await(self, saves: Sequence[_Save]) -> None:
        began = time.perf_counter()
        for save in saves:
            wait_for(save.copy)
        self.figures.add(save_wait_seconds=time.perf_counter() - began)
        self._reap_saves()

    def _current_stream(self) -> Any:
        return None if self._stream is None else self._stream()

    def _source(self, plan: LoadPlan) -> tuple[Hit | None, npt.NDArray[np.uint64]]:
        """The blocks to load, and what pins them. Raises StateError if nothing does."""
        hit = self._hits.take(plan.request_id, plan.group)
        if hit is None:
            raise StateError(f"the match of request {plan.request_id} was given up before its load")
        source = hit.addrs(plan.first, len(plan.blocks))
        if source is None:
            hit.close()
            raise StateError(f"vLLM needs more blocks of request {plan.request_id} than its window")
        return hit, source

    def _copy_out(self, plan: SavePlan) -> _core.BlockCopy:
        """Begins a save. Waits for those that it goes on from, where vLLM has dropped the blocks before it."""
        try:
            return self._begin_copy_out(plan)
        except StateError:
            earlier = [save for save in self._saves if save.plan.namespace == plan.namespace]
            if not plan.first or not earlier:
                raise
        self._await(earlier)
        return self._begin_copy_out(plan)

    def _begin_copy_out(self, plan: SavePlan) -> _core.BlockCopy:
        return self.pool.save(
            plan.tokens,
            self._addrs[plan.blocks],
            plan.namespace,
            first=plan.first,
            stream=self._current_stream(),
            wait=False,
        )

    def _save_over(self, plan: SavePlan, well: bool) -> None:
        """A save has ended, or was not begun."""

    def _load_over(self, plan: LoadPlan) -> None:
        """A load has ended, or could not begin."""

    def _copy_in(self, plan: LoadPlan, wait: bool) -> bool:
        """Whether the load has ended well, or begun."""
        hit = None
        began = time.perf_counter()
        try:
            hit, source = self._source(plan)
            self.await_saves_of(set(plan.blocks.tolist()))
            copy = self.pool.load(source, self._addrs[plan.blocks], stream=self._current_stream(), wait=wait)
        except Error as error:
            self._end_load(plan, hit, began, error)
            return False
        if isinstance(copy, int):
            self._end_load(plan, hit, began, None)
        else:
            self._loads[plan.request_id, plan.group] = _Load(copy, hit, plan, began)
        return True

    def _end_load(self, plan: LoadPlan, hit: Hit | None, began: float, error: Exception | None) -> None:
        if hit is not None:
            hit.close()
        if error is None:
            self._loaded(plan.blocks, began)
        else:
            self._load_failed(plan.blocks, error)
        self._load_over(plan)

    def _loaded(self, blocks: npt.NDArray[np.int64], began: float) -> None:
        if self.suspects:
            self.suspects.difference_update(blocks.tolist())
        self.figures.add(
            loads=1, loaded_tokens=len(blocks) * self._block_tokens, load_seconds=time.perf_counter() - began
        )

    def _load_failed(self, blocks: npt.NDArray[np.int64], error: Exception) -> None:
        _log.warning("a load of %d blocks failed, and their tokens are computed instead: %s", len(blocks), error)
        self.figures.add(failed_loads=1)
        self._failed_blocks.update(blocks.tolist())
        self.suspects.update(blocks.tolist())

    def _reap_loads(self) -> None:
        for key, load in list(self._loads.items()):
            if load.copy.done():
                del self._loads[key]
                self._ended_loads.add(load.plan.request_id)
                error = load.copy.exception(0)
                if error is not None:
                    self._failed_loads.add(load.plan.request_id)
                self._end_load(load.plan, load.hit, load.began, error)

    def _reap_saves(self) -> None:
        if not any(save.copy.done() for save in self._saves):
            return
        left = []
        for save in self._saves:
            if not save.copy.done():
                left.append(save)
                continue
            error = save.copy.exception(0)
            if error is None:
                self.figures.add(saves=1, saved_tokens=save.copy.result * self._block_tokens)
                self._save_over(save.plan, well=True)
            else:
                self._save_failed(save.plan, error)
        self._saves = left

    def _save_failed(self, plan: SavePlan, error: Exception) -> None:
        self._save_over(plan, well=False)
        self.figures.add(failed_saves=1)
        # Nothing to tell a person at each step: without room, what is cached is all in use; in a gap, what vLLM has
        # dropped of the prompt is not cached any more.
        gap = plan.first > 0 and isinstance(error, StateError)
        if gap:
            self.gaps.add(plan.request_id)
        level = logging.DEBUG if gap or isinstance(error, OutOfBlocks) else logging.WARNING
        _log.log(level, "blocks were not saved: %s", error)


def wait_for(copy: _core.BlockCopy) -> None:
    """Returns when a copy has ended, well or not: until then its blocks must not be touched."""
    while not copy.done():
        try:
            copy.exception()
        except DeadlineExceeded:
            _log.warning("a copy between vLLM's blocks and DRAM takes long; waiting on")
