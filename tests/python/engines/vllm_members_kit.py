"""Engines like those of vllm_kit in a cluster: they send each other prompts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from engines.vllm_kit import BLOCK, LAYOUT, Engine, Request, content

import kvpool
from kvpool.engines.vllm.expected import Expected
from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.member_pool import MemberPool
from kvpool.engines.vllm.members import Membership
from kvpool.engines.vllm.outgoing import Outgoing
from kvpool.engines.vllm.planner import Planner
from kvpool.engines.vllm.plans import StepPlan
from kvpool.engines.vllm.pulls import Pulls

WAIT_S = 20.0
TO = {"kvpool": {"to": "decode-0"}}


class Clock:
    """Stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A pool that begins no send, or ends none, as long as it is closed."""

    def __init__(self, pool: kvpool.Pool):
        self._pool = pool
        self.sends: list[dict[str, Any]] = []
        self.errors: list[kvpool.Error] = []  # of the next sends
        self.delayed = False
        self.unreachable = False
        self._open = threading.Event()
        self._open.set()

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def close_gate(self) -> None:
        self._open.clear()

    def open_gate(self) -> None:
        self._open.set()

    def _meet(self, name, timeout):
        assert self._open.wait(WAIT_S)
        if self.unreachable:
            raise kvpool.PeerLost("the test says so")
        self._pool._meet(name, timeout)

    def transfer_with_insert(self, peer, tokens, addrs, **how):
        self.sends.append({"tokens": len(tokens), "private": how["private"], "layerwise": how.get("layerwise", False)})
        if self.errors:
            raise self.errors.pop(0)
        if self.delayed:
            return DelayedSend(lambda: self._pool.transfer_with_insert(peer, tokens, addrs, **how))
        return self._pool.transfer_with_insert(peer, tokens, addrs, **how)


class DelayedSend:
    """A send that reads its blocks when somebody waits for it, or ends it: as late as a send can."""

    def __init__(self, start):
        self._start = start
        self._real: Any = None
        self._error: Exception | None = None

    def finish(self):
        if self._real is None and self._error is None:
            self._real = self._start()
            self._real.exception(WAIT_S)

    def done(self):
        return self._real is not None or self._error is not None

    def exception(self, timeout=None):
        if timeout:
            self.finish()
        return self._error or self._real.exception(0)

    def cancel(self):
        self._error = self._error or kvpool.Cancelled("the test says so")
        return True

    @property
    def stats(self):
        return self._real.stats


class PrefillAndDecode(Engine):
    """An engine that computes prompts for others, and answers theirs."""

    def finish(self, request: Request) -> Any:
        """What the answer says."""
        answer = self.planner.answer(request.request_id)
        super().finish(request)
        return answer

    def prefill(self, request: Request, chunk: int = 1 << 20) -> Any:
        """Computes a prompt in chunks, and ends it. Returns what the answer says."""
        self.start(request)
        assert self.admit(request)
        while request.num_computed_tokens < request.num_tokens:
            self.step({request.request_id: min(chunk, request.num_tokens - request.num_computed_tokens)})
        self.check(request)
        return self.finish(request)

    def decode(self, request: Request) -> int:
        """Waits for a prompt, computes the rest, and ends it. Returns the tokens that were loaded."""
        self.start(request)
        until = time.monotonic() + WAIT_S
        while (more := self.planner.match(request, 0)[0]) is None:
            assert time.monotonic() < until
            self.step({})
            time.sleep(0.001)
        assert self.admit(request)
        assert self.external[request.request_id] == more
        self.step({request.request_id: request.num_tokens - more})
        self.check(request)
        self.finish(request)
        return more


class MemberEngine(PrefillAndDecode):
    """An engine in a cluster."""

    def __init__(
        self, url: str, name: str, *, by_layer: bool = False, pull: bool = False, timeout_s: float = WAIT_S, **how: Any
    ):
        self._url, self._name, self._timeout_s = url, name, timeout_s
        self.by_layer = by_layer
        self.clock = Clock()
        self.groups = how.get("groups") or Groups(BLOCK)
        super().__init__(held=False, **how)
        self.planner = Planner(
            self.engine,
            BLOCK,
            groups=self.groups,
            async_load=how.get("async_load", False),
            expected=Expected(self.engine, timeout_s, self.clock),
            outgoing=Outgoing(self.engine, name, self.groups),
            pulls=Pulls(self.engine, timeout_s, pull, self.clock, self.groups),
        )

    def _make(self, blocks: int, dram_blocks: int, held: bool) -> Any:
        pool = self._new_pool(blocks, dram_blocks, held)
        membership = Membership(pool, self._url, "both", None, {"lease": 60.0})
        self.pool = Gate(pool)
        self.engine = MemberPool(self.pool, blocks, membership, self._timeout_s, groups=len(self.groups))
        self.engine._arrivals._clock = self.clock
        return self.engine

    def _new_pool(self, blocks: int, dram_blocks: int, held: bool, **settings: Any) -> Any:
        layers = [np.full((blocks, 2, BLOCK, 8), -1, np.float32) for _ in range(2)]
        self.memories.append(layers)
        return kvpool.Pool(
            LAYOUT, hbm=layers, engine_allocates=True, dram_blocks=dram_blocks, huge_pages="never", audit=True,
            name=self._name, **settings,
        )  # fmt: skip

    def _execute(self, step: StepPlan, counts: dict[str, int]) -> tuple[set[str], set[int]]:
        self.engine.begin_step()
        self._begin(self.engine, step)
        for layer in range(2):
            for request_id, count in counts.items():
                self._compute_layer(self.requests[request_id], count, layer)
            if self.by_layer:
                self.engine.layer_computed(layer, step.sends)
        self.computed_tokens += sum(counts.values())
        for send in step.sends:
            self.engine.send(send)
        for save in step.saves:
            self.engine.begin_save(save)
        return self.engine.take_ended_loads(), self.engine.take_failed_blocks()

    def _compute_layer(self, request: Request, count: int, layer: int) -> None:
        tensor = self.memories[0][layer]
        for at in range(request.num_computed_tokens, min(request.num_computed_tokens + count, request.num_tokens)):
            tensor[request.blocks[at // BLOCK], :, at % BLOCK] = content(request, at) + layer

    def quiet(self) -> None:
        """All sends have ended, in their own time."""
        until = time.monotonic() + WAIT_S
        while self.engine._sends.busy:
            assert time.monotonic() < until
            time.sleep(0.001)

    def figures(self) -> dict[str, float]:
        return self.engine.take_figures()

    def close(self) -> None:
        self.pool.open_gate()
        if not self.engine.pool.closed:
            super().close()


@contextlib.contextmanager
def engines(url: str, *names: str, **how: Any) -> Iterator[list[MemberEngine]]:
    """Engines that know each other."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in names:
            made.append(MemberEngine(url, name, **how))
            stack.callback(made[-1].close)
        until = time.monotonic() + WAIT_S
        while not all(one.engine.is_member(other) for one in made for other in names if other != one._name):
            assert time.monotonic() < until
            time.sleep(0.001)
        yield made


def connect(prefill: MemberEngine, peer: str = "decode-0") -> None:
    prefill.pool._meet(peer, WAIT_S)
