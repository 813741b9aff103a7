"""The scheduler's side: which blocks a step loads, saves and writes. Knows vLLM's objects by their attributes alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.engines.vllm.engine_pool import EnginePool
from kvpool.engines.vllm.expected import Expected
from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.outgoing import Outgoing
from kvpool.engines.vllm.params import read
from kvpool.engines.vllm.plans import NULL_BLOCK, GroupBlocks, LoadPlan, SavePlan, StepPlan, ids, needed_from
from kvpool.engines.vllm.pulls import Pulls
from kvpool.engines.vllm.requests import Tracked, cacheable, namespace_of
from kvpool.engines.vllm.scheduler_index import SchedulerIndex

__all__ = ["Planner"]

_log = logging.getLogger("kvpool.engines.vllm")


class Planner:
    """Plans loads and saves of one engine. Not thread-safe.

    Args:
        engine: Where loads and saves are carried out, or what is known of it.
        block_tokens: Tokens in a block.
        groups: Of layers, each with its blocks; None: there is one, which attends to all tokens.
        loads: Prompts are looked up.
        saves: Blocks are saved.
        async_load: Loads are carried out beside steps.
        expected: Requests wait here for the prompts of other engines. None: none does.
        outgoing: Prompts are sent from here to other engines. None: none is.
        pulls: Prompts are fetched from other engines. None: none is.
        on_save: Called with a request of vLLM and each plan of a save.
    """

    def __init__(
        self,
        engine: EnginePool | SchedulerIndex,
        block_tokens: int,
        *,
        groups: Groups | None = None,
        loads: bool = True,
        saves: bool = True,
        async_load: bool = False,
        expected: Expected | None = None,
        outgoing: Outgoing | None = None,
        pulls: Pulls | None = None,
        on_save: Callable[[Any, SavePlan], None] | None = None,
    ) -> None:
        self._engine = engine
        self._expected, self._outgoing, self._pulls = expected, outgoing, pulls
        self._on_save = on_save
        self._block_tokens = block_tokens
        self._groups = groups or Groups(block_tokens)
        self._reads, self._writes = loads, saves
        self._async_load = async_load
        self._tracked: dict[str, Tracked] = {}
        self._offered: set[str] = set()  # pinned, and no load was planned
        self._loads: list[LoadPlan] = []
        self._loading: dict[str, npt.NDArray[np.int64]] = {}  # blocks of the last load of each request
        self._planned_saves = False  # or sends, by the previous step

    def add(self, request: Any) -> Tracked:
        """A request that is new, or that has the id of one that has ended."""
        self.finish(request.request_id)
        fit = cacheable(request)
        tracked = Tracked(
            request=request,
            namespace=namespace_of(request) if fit else "",
            readable=fit and self._reads and not request.skip_reading_prefix_cache,
            writable=fit and self._writes,
        )
        self._tracked[request.request_id] = tracked
        if fit:
            self._meet_others(tracked)
        return tracked

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens are cached beyond the `computed` first, and whether they are loaded beside steps.

        None: it should be asked again later, because the prompt comes from another engine, or may. The hit stays pinned
        until the step is planned. At least one token is left to compute.
        """
        tracked = self._tracked.get(request.request_id) or self.add(request)
        tracked.planned, tracked.local, tracked.gap, tracked.tails = 0, computed, False, {}
        tracked.boundary = 0
        self._loading.pop(request.request_id, None)
        if not tracked.readable:
            return 0, False
        tokens = tracked.tokens.first(request, request.num_tokens - 1)
        # In this order: what arrives after the look-up is not found by it.
        arrived = self._expected is not None and self._expected.has_arrived(request.request_id)
        found = self._engine.pin(
            request.request_id, tokens, tracked.namespace, self._groups, self._ends(tracked), tracked.digests
        )
        if self._expected is not None and not arrived:
            wanted = len(tokens) // self._block_tokens * self._block_tokens
            if self._expected.must_wait(request.request_id, max(found, computed), wanted):
                self._engine.unpin(request.request_id)
                return None, False
        if self._pulls is not None and self._pulls.must_wait(request.request_id, tokens, max(found, computed)):
            self._engine.unpin(request.request_id)
            return None, False
        if computed % self._block_tokens:  # vLLM has a part of a block, which no load could go on from
            found = 0
        tracked.planned = found // self._block_tokens
        tracked.tails = self._engine.tails(request.request_id)  # also if vLLM has as much: they are saved on
        if found <= computed:
            self._engine.unpin(request.request_id)
            self._loads_now(request.request_id)
            return 0, False
        self._offered.add(request.request_id)
        return found - computed, self._async_load

    def allocated(self, request: Any, blocks: GroupBlocks, external: int) -> None:
        """VLLM has blocks for the request: `external` tokens after its own are to be loaded into them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not external:
            return
        first = tracked.local // self._block_tokens
        end = first + external // self._block_tokens
        self._offered.discard(request.request_id)
        self._loads_now(request.request_id)
        loads = []
        for group, of_group in enumerate(blocks):
            begin = max(first, needed_from(of_group[:end]))
            loads.append(LoadPlan(request.request_id, begin, ids(of_group[begin:end]), group=group))
        self._loads += loads
        self._loading[request.request_id] = np.concatenate([load.blocks for load in loads])

    def plan(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], GroupBlocks],
        copies_blocks: bool = False,
    ) -> StepPlan:
        """The plan of a step.

        Args:
            scheduled: Request ids, and how many tokens of each the step computes.
            blocks_of: The block ids of a request, for each group of layers.
            copies_blocks: vLLM itself copies blocks in this step.
        """
        self._release_offers()
        if self._pulls is not None:
            self._pulls.let_dropped_go()
        step = StepPlan(loads=self._loads)
        self._loads = []
        guarded = self._planned_saves or self._engine.saving or bool(self._engine.suspects)
        self._learn_gaps()
        for request_id, count in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if guarded:
                self._note_writes(step, tracked, count, blocks_of(request_id))
            step.saves += self._saves_of(tracked, count, blocks_of)
            if self._outgoing is not None:
                step.sends += self._outgoing.plan(request_id, count, blocks_of)
        if copies_blocks:
            step.written = None
        elif step.written is not None:
            for load in step.loads:
                step.written.update(load.blocks.tolist())
        self._planned_saves = bool(step.saves or step.sends)
        return step

    def failed(self, blocks: Iterable[int]) -> None:
        """Loads into these blocks have failed: their requests are never looked up again."""
        wrong = np.fromiter(blocks, np.int64)
        self._engine.suspects.update(wrong.tolist())
        for request_id, loading in self._loading.items():
            if np.isin(loading, wrong).any():
                tracked = self._tracked[request_id]
                tracked.readable = False
                tracked.planned = tracked.local // self._block_tokens
                if self._outgoing is not None:
                    self._outgoing.restart(request_id)

    def failed_loads(self, requests: Iterable[str]) -> None:
        """Loads of these requests have failed: as `failed`, where vLLM hears of requests and not of blocks."""
        for request_id in requests:
            if request_id in self._loading:
                self.failed(self._loading[request_id].tolist())

    def answer(self, request_id: str) -> dict[str, Any] | None:
        """``kv_transfer_params`` of the request's answer: what another engine must know of the prompt."""
        announced = None if self._outgoing is None else self._outgoing.announced(request_id)
        return None if announced is None else announced.told()

    def finish(self, request_id: str) -> None:
        """The request has ended. A load under way goes on; vLLM keeps its blocks until it is told the end."""
        self._tracked.pop(request_id, None)
        self._loading.pop(request_id, None)
        self._loads_now(request_id)
        if self._outgoing is not None:
            self._outgoing.finish(request_id)
        if request_id in self._offered:
            self._offered.discard(request_id)
            self._engine.unpin(request_id)

    def reset(self) -> bool:
        """Forgets all that is cached. What running requests compute was computed before, and is not saved any more."""
        for tracked in self._tracked.values():
            if tracked.request.num_computed_tokens:
                tracked.writable = False
            tracked.planned = 0
        if self._outgoing is not None:
            self._outgoing.drop_computed()
        if self._pulls is not None:
            self._pulls.cancel()
        self._offered.clear()
        return self._engine.clear()

    # ----

    def _meet_others(self, tracked: Tracked) -> None:
        """What the request says about other engines."""
        request = tracked.request
        params = read(request.kv_transfer_params)
        missing = (
            (params.announced is not None and self._expected is None)
            or (params.to and self._outgoing is None)
            or (params.pull and self._pulls is None)
        )
        if missing:
            _log.warning(
                "kv_transfer_params of a request are ignored: this engine is in no cluster, or has another role"
            )
        if self._expected is not None and params.announced is not None and tracked.readable:
            self._expected.add(request.request_id, params.announced)
        elif self._pulls is not None and tracked.readable:
            self._pulls.add(request.request_id, tracked.namespace, params.pull, tracked.digests)
        if self._outgoing is not None and params.to:
            self._outgoing.add(tracked, params.to)

    def _loads_now(self, request_id: str) -> None:
        """The request waits for no other engine any more."""
        if self._expected is not None:
            self._expected.finish(request_id)
        if self._pulls is not None:
            self._pulls.finish(request_id)

    def _release_offers(self) -> None:
        """VLLM had no room for these, and asks again."""
        for request_id in self._offered:
            self._engine.unpin(request_id)
        self._offered.clear()

    def _saves_of(self, tracked: Tracked, count: int, blocks_of: Callable[[str], GroupBlocks]) -> list[SavePlan]:
        """What is whole when the step has ended, if that is more than before: a plan for each group.

        Only tokens that are known: drafts may be rejected, and with asynchronous scheduling vLLM counts tokens as
        computed that nobody knows yet.
        """
        request = tracked.request
        end = request.num_computed_tokens + count
        if end % self._block_tokens == 0:
            tracked.boundary = end
        full = min(end, request.num_tokens) // self._block_tokens
        if full <= tracked.planned or not tracked.writable or tracked.gap:
            return []
        tracked.planned = full
        tokens = tracked.tokens.first(request, full * self._block_tokens)
        saves = []
        for group, of_group in enumerate(blocks_of(request.request_id)):
            if self._groups.has_states(group):
                saves += self._saves_of_state(tracked, group, tokens, of_group)
                continue
            begin = tracked.tails.get(group, 0)
            part = self._groups.part(group, tracked.namespace, tokens, begin, tracked.digests)
            first = max(begin, needed_from(of_group[:full]))
            blocks = ids(of_group[first:full])
            saves.append(SavePlan(request.request_id, part.namespace, part.tokens, blocks, first=first - begin))
        if self._on_save is not None and 0 not in tracked.tails:
            self._on_save(request, saves[0])
        return saves

    def _saves_of_state(
        self, tracked: Tracked, group: int, tokens: npt.NDArray[np.int32], blocks: Sequence[int]
    ) -> list[SavePlan]:
        """The state after these tokens. None, if no step ended there: then no block has it.

        What vLLM computes next writes to the next block, and until it drops this one it is in the request's list.
        """
        last = len(tokens) // self._block_tokens - 1
        if tracked.boundary != len(tokens) or blocks[last] == NULL_BLOCK:
            return []
        part = self._groups.part(group, tracked.namespace, tokens, last, tracked.digests)
        self._engine.note_state(part.namespace, tokens, last * self._block_tokens)
        return [SavePlan(tracked.request.request_id, part.namespace, part.tokens, ids(blocks[last : last + 1]))]

    def _ends(self, tracked: Tracked) -> list[int]:
        """Where tails may end that other engines have sent, or that were fetched."""
        request_id = tracked.request.request_id
        waits = [each for each in (self._expected, self._pulls) if each is not None]
        return [end for each in waits if (end := each.end(request_id))]

    def _learn_gaps(self) -> None:
        """Requests of which a group lacks blocks: what the other groups saved would be of no use."""
        for request_id in self._engine.gaps:
            if request_id in self._tracked:
                self._tracked[request_id].gap = True
        self._engine.gaps.clear()

    def _note_writes(self, step: StepPlan, tracked: Tracked, count: int, blocks: GroupBlocks) -> None:
        """The step writes from the first token that is not computed on."""
        computed = tracked.request.num_computed_tokens
        first = computed // self._block_tokens
        assert step.written is not None
        for of_group in blocks:
            step.written.update(of_group[first:])
            if self._engine.suspects:
                self._engine.rewritten(of_group[first : (computed + count) // self._block_tokens])
