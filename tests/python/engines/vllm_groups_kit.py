"""The engines of vllm_kit with two groups of layers: one that attends to all tokens, and one to a window of them.

A block belongs to one group at a time, and both have the same memory. As vLLM does, the engine drops the blocks before
the window at the next step, and others write to them at once.
"""

from __future__ import annotations

from typing import Any

from engines.vllm_apart_kit import ApartEngine
from engines.vllm_kit import BLOCK, Engine, Request, content

from kvpool.engines.vllm import groups

WINDOW = 6  # tokens
NULL = 0


class Groups(Engine):
    """Every request has two lists of blocks; loads are beside steps, as the connector has them for groups."""

    def __init__(self, windowed: tuple[bool, ...] = (False, True), **how: Any):
        self.of: dict[str, list[list[int]]] = {}
        self.windowed = windowed
        super().__init__(
            **{"blocks": 20 * len(windowed), "async_load": True, "groups": groups_of(windowed, tails=False), **how}
        )

    def admit(self, request: Request) -> bool:
        more, later = self.planner.match(request, request.num_computed_tokens)
        total = request.num_computed_tokens + more
        blocks = -(-request.num_tokens // BLOCK)
        skipped = [skipped_blocks(total) if windowed else 0 for windowed in self.windowed]
        if sum(blocks - of_group for of_group in skipped) > len(self.free):
            return False
        self.of[request.request_id] = [
            [NULL] * of_group + [self.free.pop() for _ in range(blocks - of_group)] for of_group in skipped
        ]
        self.planner.allocated(request, self.of[request.request_id], more)
        self.external[request.request_id] = more
        request.num_computed_tokens = total
        if later and more:
            self.waiting.add(request.request_id)
        return True

    def step(self, counts: dict[str, int]) -> set[str]:
        """As of vllm_kit. Returns the requests whose loads failed: vLLM begins with these again."""
        for request_id in counts:
            self._drop(self.requests[request_id])
        step = self.planner.plan(counts, self.of.__getitem__)
        ended, _ = self._execute(step, counts)
        failed = self._failed(ended)
        for request_id, count in counts.items():
            self.requests[request_id].num_computed_tokens += count
        self.planner.failed_loads(failed)
        self.waiting -= ended
        for request_id in failed & self.requests.keys():
            self.preempt(self.requests[request_id])
        return failed

    def run(self, request: Request, chunk: int = 1 << 20) -> int:
        self.start(request)
        assert self.admit(request)
        while request.request_id in self.waiting:
            self.pool.finish_all()
            if self.step({}):
                assert self.admit(request)
        while request.num_computed_tokens < request.num_tokens:
            self.step({request.request_id: min(chunk, request.num_tokens - request.num_computed_tokens)})
        self.check(request)
        self.finish(request)
        return self.external[request.request_id]

    def check(self, request: Request) -> None:
        """All that is computed or loaded, and that the next token needs, is right for both groups."""
        first = max(0, request.num_computed_tokens - WINDOW + 1)
        for group, of_group in enumerate(self.of[request.request_id]):
            for at in range(first if self.windowed[group] else 0, request.num_computed_tokens):
                assert of_group[at // BLOCK] != NULL
                for layer, tensor in self._tensors():
                    right = content(request, at) + layer + group / 2
                    assert (tensor[of_group[at // BLOCK], :, at % BLOCK] == right).all(), (
                        request.request_id,
                        group,
                        at,
                    )

    def _failed(self, ended: set[str]) -> set[str]:
        return self.engine.take_failed_loads(ended)

    def _drop(self, request: Request) -> None:
        """Those before the window of the next token; the next that somebody takes are these."""
        for windowed, of_group in zip(self.windowed, self.of[request.request_id], strict=True):
            for position in range(skipped_blocks(request.num_computed_tokens) if windowed else 0):
                if of_group[position] != NULL:
                    self.free.append(of_group[position])
                    of_group[position] = NULL

    def _compute(self, request: Request, count: int) -> None:
        self.computed_tokens += count
        end = min(request.num_computed_tokens + count, request.num_tokens)
        for group, of_group in enumerate(self.of[request.request_id]):
            for at in range(request.num_computed_tokens, end):
                for layer, tensor in self._tensors():
                    tensor[of_group[at // BLOCK], :, at % BLOCK] = content(request, at) + layer + group / 2

    def _release(self, request: Request) -> None:
        for of_group in self.of.pop(request.request_id, []):
            self.free += [block for block in of_group if block != NULL]


class ApartGroups(Groups, ApartEngine):
    """With workers in other processes: a load has failed if it has at one of them."""

    def _failed(self, ended: set[str]) -> set[str]:
        return {request_id for worker in self.workers for request_id in worker.take_failed_loads(ended)}


def groups_of(windowed: tuple[bool, ...], tails: bool) -> groups.Groups:
    return groups.Groups(BLOCK, tuple(WINDOW if one else None for one in windowed), tails)


def skipped_blocks(computed: int) -> int:
    """As vLLM's SlidingWindowManager has it: those that the next token does not attend to."""
    return max(0, computed - WINDOW + 1) // BLOCK
