"""A scheduler and a worker of vLLM's kind, small enough to follow: for the connector's plans without vLLM.

Its model writes to a token's place a value that depends on all tokens up to there, as a real one does. So a block that
was loaded, shared or overwritten wrongly is seen. Its allocator gives the blocks out first that were freed last, which
is the worst that an engine can do to saves that still read them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvpool
from kvpool.engines.vllm.engine_pool import EnginePool
from kvpool.engines.vllm.options import Options
from kvpool.engines.vllm.planner import Planner
from kvpool.engines.vllm.plans import StepPlan

BLOCK = 4
LAYOUT = kvpool.KVLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_tokens=BLOCK, pages="fused")


@dataclass
class Adapter:
    lora_name: str
    lora_int_id: int


@dataclass
class Position:
    offset: int
    length: int = 1


@dataclass
class Feature:
    identifier: str
    mm_position: Position


@dataclass
class Request:
    """The attributes of vLLM's request that the connector reads."""

    request_id: str
    prompt_token_ids: list[int] | None
    cache_salt: str | None = None
    lora_request: Adapter | None = None
    mm_features: list[Feature] = field(default_factory=list)
    prompt_embeds: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    kv_transfer_params: Any = None
    blocks: list[int] = field(default_factory=list)  # the engine's own

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids or [0] * 8)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or [0] * 8)


class HeldCopy:
    """A copy that the pool begins when somebody waits for it: as late as a copy can be."""

    def __init__(self, start):
        self._start = start
        self._error: Exception | None = None
        self._over = False
        self.targets: set[int] = set()
        self.result = 0

    def finish(self) -> None:
        if self._over:
            return
        self._over = True
        try:
            self.result = self._start()
        except kvpool.Error as error:
            self._error = error

    def done(self) -> bool:
        return self._over

    def exception(self, timeout=None):
        if timeout is None:
            self.finish()
        return self._error


class HeldPool:
    """A pool whose copies in the background are HeldCopy, and whose loads fail when they are told to."""

    def __init__(self, pool: kvpool.Pool):
        self._pool = pool
        self.held: list[HeldCopy] = []
        self.fail_loads: list[str] = []  # "now": the call raises; "later": the copy fails
        self.fail_saves: list[str] = []

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def save(self, tokens, addrs, namespace="", *, first=0, stream=None, wait=True):
        tokens = np.array(tokens)
        return self._hold(lambda: self._pool.save(tokens, addrs, namespace, first=first))

    def copy(self, addrs, into, *, stream=None, wait=True):
        """Of a worker: a save."""
        how = self.fail_saves.pop(0) if self.fail_saves else ""
        if how == "now":
            raise kvpool.DeviceLost("the test says so")

        def start():
            if how == "later":
                raise kvpool.DeviceLost("the test says so")
            return self._pool.copy(addrs, into)

        targets = set(into.tolist())
        if any(not copy.done() and not targets.isdisjoint(copy.targets) for copy in self.held):
            raise kvpool.StateError("a block is reserved")  # as the pool says
        copy = self._hold(start)
        copy.targets = targets
        return copy

    def load(self, addrs, into, *, stream=None, wait=True):
        how = self.fail_loads.pop(0) if self.fail_loads else ""
        if how == "now":
            raise kvpool.DeviceLost("the test says so")

        def start():
            if how == "later":
                raise kvpool.DeviceLost("the test says so")
            return self._pool.load(addrs, into)

        return start() if wait else self._hold(start)

    def _hold(self, start):
        self.held.append(HeldCopy(start))
        return self.held[-1]

    def finish_all(self):
        for copy in self.held:
            copy.finish()
        self.held.clear()


class Engine:
    """A step at a time by `start`, `admit` and `step`; or `run`, which takes one request from its start to its end."""

    def __init__(
        self, blocks: int = 16, dram_blocks: int = 64, *, held: bool = True, prefix_cache: bool = False, **how
    ):
        self.memories: list[list[Any]] = []  # of each worker: a tensor a layer
        self.planner = Planner(self._make(blocks, dram_blocks, held), BLOCK, **how)
        self.free = list(range(blocks - 1, 0, -1))  # block 0 is vLLM's null block
        self.requests: dict[str, Request] = {}
        self.waiting: set[str] = set()  # for an asynchronous load
        self.external: dict[str, int] = {}
        self.computed_tokens = 0

    def _make(self, blocks: int, dram_blocks: int, held: bool) -> Any:
        """What the planner speaks to."""
        self.pool: Any = self._new_pool(blocks, dram_blocks, held)
        self.engine: Any = EnginePool(self.pool, blocks)
        return self.engine

    def _new_pool(self, blocks: int, dram_blocks: int, held: bool, **settings: Any) -> Any:
        layers = [np.full((blocks, 2, BLOCK, 8), -1, np.float32) for _ in range(2)]
        self.memories.append(layers)
        pool = kvpool.Pool(
            LAYOUT, hbm=layers, engine_allocates=True, dram_blocks=dram_blocks, huge_pages="never", audit=True,
            **Options().settings | settings,
        )  # fmt: skip
        return HeldPool(pool) if held else pool

    def start(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.planner.add(request)
        return request

    def admit(self, request: Request) -> bool:
        """The part of vLLM's scheduling that a new or preempted request passes. False: no room."""
        more, later = self.planner.match(request, request.num_computed_tokens)
        needed = -(-request.num_tokens // BLOCK) - len(request.blocks)
        if needed > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(needed)]
        self.planner.allocated(request, [request.blocks], more)
        self.external[request.request_id] = more
        request.num_computed_tokens += more
        if later:
            self.waiting.add(request.request_id)
        return True

    def step(self, counts: dict[str, int]) -> set[int]:
        """Schedules, executes and takes the output. Returns the blocks that failed to load."""
        for request_id, count in counts.items():
            request = self.requests[request_id]
            while len(request.blocks) * BLOCK < min(request.num_computed_tokens + count, request.num_tokens + count):
                request.blocks.append(self.free.pop())
        step = self.planner.plan(counts, lambda request_id: [self.requests[request_id].blocks])
        ended, failed = self._execute(step, counts)
        for request_id, count in counts.items():
            self.requests[request_id].num_computed_tokens += count
        for request in self.requests.values():
            wrong = [at for at, block in enumerate(request.blocks) if block in failed]
            if wrong and wrong[0] * BLOCK < request.num_computed_tokens:
                request.num_computed_tokens = wrong[0] * BLOCK
        self.planner.failed(failed)
        self.waiting -= ended
        return failed

    def _execute(self, step: StepPlan, counts: dict[str, int]) -> tuple[set[str], set[int]]:
        """The requests whose loads have ended, and the blocks that failed to load."""
        self._begin(self.engine, step)
        for request_id, count in counts.items():
            self._compute(self.requests[request_id], count)
        for save in step.saves:
            self.engine.begin_save(save)
        return self.engine.take_ended_loads(), self.engine.take_failed_blocks()

    def _begin(self, worker: Any, step: StepPlan) -> None:
        """What a worker does before it computes."""
        worker.await_saves_of(step.written)
        for load in step.loads:
            if load.request_id in self.waiting:
                worker.begin_load(load)
            else:
                worker.load(load)

    def finish(self, request: Request) -> None:
        self.planner.finish(request.request_id)
        del self.requests[request.request_id]
        self._release(request)

    def preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed_tokens = 0

    def run(self, request: Request, chunk: int = 1 << 20) -> int:
        """Prefills a prompt and ends it. Returns the tokens that were loaded."""
        self.start(request)
        assert self.admit(request)
        while request.request_id in self.waiting:
            self.pool.finish_all()
            self.step({})
        while request.num_computed_tokens < request.num_tokens:
            self.step({request.request_id: min(chunk, request.num_tokens - request.num_computed_tokens)})
        self.check(request)
        self.finish(request)
        return self.external[request.request_id]

    def check(self, request: Request) -> None:
        """All that the request has computed or loaded is right."""
        for at in range(request.num_computed_tokens):
            block, row = request.blocks[at // BLOCK], at % BLOCK
            for layer, tensor in self._tensors():
                assert (tensor[block, :, row] == content(request, at) + layer).all(), (request.request_id, at)

    def close(self) -> None:
        self.pool.audit()
        self.engine.close()

    def _compute(self, request: Request, count: int) -> None:
        self.computed_tokens += count
        for at in range(request.num_computed_tokens, min(request.num_computed_tokens + count, request.num_tokens)):
            for layer, tensor in self._tensors():
                tensor[request.blocks[at // BLOCK], :, at % BLOCK] = content(request, at) + layer

    def _tensors(self) -> Iterator[tuple[float, Any]]:
        """Of all workers, with what distinguishes their content."""
        for worker, layers in enumerate(self.memories):
            for layer, tensor in enumerate(layers):
                yield layer + worker / 4, tensor

    def _release(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = []


@contextmanager
def maker(kind: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Makes engines of one kind, which are closed at the end."""
    with ExitStack() as engines:
        yield lambda **how: engines.enter_context(closing(kind(**how)))


def content(request: Request, at: int) -> float:
    """What the model writes for a token: it depends on all before it, and on what the namespace stands for."""
    told = [request.all_token_ids[: at + 1], request.cache_salt, str(request.lora_request), str(request.mm_features)]
    return float(zlib.crc32(repr(told).encode()) % 100_000)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * at * at + 13 * at + 31 * seed) % 1000 for at in range(length)]
