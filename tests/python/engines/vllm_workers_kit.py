"""Engines in a cluster that have the same blocks: with two workers in other processes, and with one that has all."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from engines.vllm_apart_kit import ApartEngine, scheduler_pool
from engines.vllm_kit import BLOCK, LAYOUT, Request, content
from engines.vllm_members_kit import WAIT_S, Clock, MemberEngine, PrefillAndDecode

import kvpool
from kvpool.engines.vllm.expected import Expected
from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.member_index import MemberIndex
from kvpool.engines.vllm.members import Membership, secret_of
from kvpool.engines.vllm.outgoing import Outgoing
from kvpool.engines.vllm.planner import Planner
from kvpool.engines.vllm.pulls import Pulls
from kvpool.engines.vllm.scheduler_index import SchedulerIndex

HEADS = LAYOUT.kv_heads  # of each worker
WHOLE = replace(LAYOUT, kv_heads=2 * HEADS)


class WorkersEngine(PrefillAndDecode, ApartEngine):
    """An engine in a cluster, with two workers."""

    index: MemberIndex

    def __init__(
        self,
        url: str,
        name: str,
        *,
        joined: bool = True,
        listen: str | None = None,
        timeout_s: float = WAIT_S,
        **how: Any,
    ):
        self._url, self.name, self._listen, self._timeout_s = url, name, listen, timeout_s
        self.clock = Clock()
        self.groups = how.get("groups") or Groups(BLOCK)
        super().__init__(**how)
        self.planner = Planner(
            self.index, BLOCK, groups=self.groups, async_load=how.get("async_load", False),
            expected=Expected(self.index, timeout_s, self.clock),
            outgoing=Outgoing(self.index, name, self.groups),
            pulls=Pulls(self.index, timeout_s, False, self.clock, self.groups),
        )  # fmt: skip
        if joined:
            self.advance()

    def advance(self) -> None:
        """What vLLM does when it has no requests: it goes on with steps until all is saved and sent."""
        until = time.monotonic() + WAIT_S
        while self.index.has_work:
            assert time.monotonic() < until
            self.pool.finish_all()
            self.step({})

    def prefill(self, request: Request, chunk: int = 1 << 20) -> Any:
        told = super().prefill(request, chunk)
        self.advance()
        return told

    def is_member(self, name: str) -> bool:
        return self.index.is_member(name)

    def figures(self) -> dict[str, float]:
        return self.take_figures()

    def _new_index(self, blocks: int, dram_blocks: int, workers: int) -> SchedulerIndex:
        pool = scheduler_pool(blocks, dram_blocks, workers, name=self.name)
        index = MemberIndex(
            pool, Membership(pool, self._url, "both", self._listen, {"lease": 60.0}), self._timeout_s, len(self.groups)
        )
        index._arrivals._clock = self.clock
        return index

    def _new_pool(self, blocks: int, dram_blocks: int, held: bool, **settings: Any) -> Any:
        return super()._new_pool(blocks, dram_blocks, held, secret=secret_of(self._url))


class OneApart(WorkersEngine):
    """With one worker in another process, whose blocks are smaller."""

    count = 1


class OneWorker(MemberEngine):
    """An engine in a cluster whose worker has all heads. What is computed is as if it had two."""

    def __init__(self, url: str, name: str, **how: Any):
        super().__init__(url, name, **how)
        self.name = name

    def is_member(self, name: str) -> bool:
        return self.engine.is_member(name)

    def advance(self) -> None:
        self.quiet()

    def _new_pool(self, blocks: int, dram_blocks: int, held: bool, **settings: Any) -> Any:
        layers = [np.full((blocks, 2 * HEADS, BLOCK, 8), -1, np.float32) for _ in range(2)]
        self.memories += [[tensor[:, :HEADS] for tensor in layers], [tensor[:, HEADS:] for tensor in layers]]
        return kvpool.Pool(
            WHOLE, hbm=layers, engine_allocates=True, dram_blocks=dram_blocks, huge_pages="never",
            audit=True, name=self._name, **settings,
        )  # fmt: skip

    def _compute_layer(self, request: Request, count: int, layer: int) -> None:
        for worker, tensors in enumerate(self.memories):
            for at in range(request.num_computed_tokens, min(request.num_computed_tokens + count, request.num_tokens)):
                value = content(request, at) + layer + worker / 4
                tensors[layer][request.blocks[at // BLOCK], :, at % BLOCK] = value
