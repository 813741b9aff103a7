"""The engines of vllm_groups_kit in a cluster: with one worker, and with two in other processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from attach_kit import eventually
from engines.vllm_groups_kit import ApartGroups, Groups, groups_of
from engines.vllm_kit import BLOCK, Request, content
from engines.vllm_members_kit import WAIT_S, MemberEngine, PrefillAndDecode
from engines.vllm_workers_kit import WorkersEngine

import kvpool


class _Members(PrefillAndDecode):
    """Loads are beside steps."""

    windowed: tuple[bool, ...]
    advance: Callable[[], None]

    def prefill(self, request: Request, chunk: int = 1 << 20) -> Any:
        self.start(request)
        self._admitted(request)
        while request.num_computed_tokens < request.num_tokens:
            self.step({request.request_id: min(chunk, request.num_tokens - request.num_computed_tokens)})
        self.check(request)
        told = self.finish(request)
        self.advance()
        return told

    def decode(self, request: Request, computed: int = 0) -> int:
        """Returns the tokens that it did not compute. The first `computed` ones vLLM's own cache has."""
        self.start(request)
        request.num_computed_tokens = computed
        self._admitted(request)
        if computed:
            self._have(request, computed)
        while request.num_computed_tokens < request.num_tokens:
            self.step({request.request_id: request.num_tokens - request.num_computed_tokens})
        self.check(request)
        self.finish(request)
        self.advance()
        return computed + self.external[request.request_id]

    def cached(self, tokens: list[int], group: int) -> int:
        """How much of the group's whole prompt is in the cache."""
        namespace = f"#{group}" if group else ""
        return self.planner._engine.pool.explain_match(tokens, namespace).matched_tokens

    def _admitted(self, request: Request) -> None:
        """It has its prompt, and what it loads."""
        until = time.monotonic() + WAIT_S
        while self.planner.match(request, request.num_computed_tokens)[0] is None:
            assert time.monotonic() < until
            self.step({})
            time.sleep(0.001)
        assert self.admit(request)
        while request.request_id in self.waiting:
            assert time.monotonic() < until
            self._go_on()
            if self.step({}):
                assert self.admit(request)

    def _go_on(self) -> None:
        """Copies that are held begin."""

    def _have(self, request: Request, count: int) -> None:
        """The blocks of the first tokens have their content."""
        before, request.num_computed_tokens = request.num_computed_tokens, 0
        self._compute(request, count)
        request.num_computed_tokens = before


class MemberGroups(_Members, Groups, MemberEngine):
    """With one worker."""

    def __init__(self, url: str, name: str, windowed: tuple[bool, ...] = (False, True), **how: Any):
        super().__init__(windowed=windowed, url=url, name=name, groups=groups_of(windowed, tails=True), **how)
        self.name = name

    def advance(self) -> None:
        """All that the engine does by itself has ended."""
        self.quiet()
        self.engine.await_saves_of(None)
        self.step({})

    def is_member(self, name: str) -> bool:
        return self.engine.is_member(name)

    def _compute_layer(self, request: Request, count: int, layer: int) -> None:
        end = min(request.num_computed_tokens + count, request.num_tokens)
        for group, of_group in enumerate(self.of[request.request_id]):
            for at in range(request.num_computed_tokens, end):
                right = content(request, at) + layer + group / 2
                self.memories[0][layer][of_group[at // BLOCK], :, at % BLOCK] = right


class WorkersGroups(_Members, ApartGroups, WorkersEngine):
    """With two workers in other processes."""

    def __init__(self, url: str, name: str, windowed: tuple[bool, ...] = (False, True), **how: Any):
        super().__init__(windowed=windowed, url=url, name=name, groups=groups_of(windowed, tails=True), **how)

    def _go_on(self) -> None:
        self.pool.finish_all()


@contextlib.contextmanager
def two(url: str, kind: Any, **how: Any) -> Iterator[Any]:
    """Two engines of a kind: "prefill-0" and "decode-0"."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("prefill-0", "decode-0"):
            made.append(kind(url, name, **how))
            stack.callback(made[-1].close)
        eventually(lambda: made[0].is_member("decode-0") and made[1].is_member("prefill-0"))
        yield made


def evict_all(engine: Any) -> None:
    while engine.planner._engine.pool.evict(100, kvpool.DRAM):
        pass
