"""The engines of vllm_kit with two groups of layers: one that attends to all tokens, and one of states (Mamba).

A state is in the block that the last token belongs to, and stands for all tokens so far. As vLLM does in its mode
"align", the engine has a block for the end of each step, null blocks between these, and drops a state when the step
after the next one is planned. Others write to it at once.
"""

from __future__ import annotations

from typing import Any

from engines.vllm_apart_kit import ApartEngine
from engines.vllm_groups_kit import NULL, ApartGroups, Groups
from engines.vllm_kit import BLOCK, Request, content

from kvpool.engines.vllm import groups

STATE = 0.5  # what distinguishes the content of states


class States(Groups):
    """The group of states is the first one, as vLLM has it in most models, or the second."""

    def __init__(self, states: tuple[bool, ...] = (True, False), **how: Any):
        self.states = states
        self.held_since: dict[str, list[int]] = {}  # positions of states, the oldest first
        kinds = groups.Groups(BLOCK, (None,) * len(states), states=states)
        super().__init__(**{"windowed": (False,) * len(states), "blocks": 60, "groups": kinds, **how})

    def admit(self, request: Request) -> bool:
        more, later = self.planner.match(request, request.num_computed_tokens)
        total = request.num_computed_tokens + more
        assert total % BLOCK == 0
        self.of[request.request_id] = [
            self._state_at(total) if state else [self.free.pop() for _ in range(-(-request.num_tokens // BLOCK))]
            for state in self.states
        ]
        self.held_since[request.request_id] = [total // BLOCK - 1] if total else []
        self.planner.allocated(request, self.of[request.request_id], more)
        self.external[request.request_id] = more
        request.num_computed_tokens = total
        if later and more:
            self.waiting.add(request.request_id)
        return True

    def _state_at(self, tokens: int) -> list[int]:
        return [NULL] * (tokens // BLOCK - 1) + [self.free.pop()] if tokens else []

    def step(self, counts: dict[str, int]) -> set[str]:
        for request_id, count in counts.items():
            self._extend(request_id, self.requests[request_id].num_computed_tokens + count)
        return super().step(counts)

    def _extend(self, request_id: str, end: int) -> None:
        """A block for the state at the end of the step; the state before the last one goes."""
        position = (end - 1) // BLOCK
        held = self.held_since[request_id]
        for blocks, state in zip(self.of[request_id], self.states, strict=True):
            if not state or position < len(blocks):
                continue
            while len(held) > 1:
                gone = held.pop(0)
                self.free.append(blocks[gone])
                blocks[gone] = NULL
            blocks += [NULL] * (position - len(blocks))
            blocks.append(self.free.pop())
            held.append(position)

    def check(self, request: Request) -> None:
        end = request.num_computed_tokens
        for group, of_group in enumerate(self.of[request.request_id]):
            for layer, tensor in self._tensors():
                if self.states[group]:
                    right = content(request, end - 1) + layer + STATE
                    assert (tensor[of_group[(end - 1) // BLOCK]] == right).all(), (request.request_id, end)
                    continue
                for at in range(end):
                    right = content(request, at) + layer
                    assert (tensor[of_group[at // BLOCK], :, at % BLOCK] == right).all(), (request.request_id, at)

    def _drop(self, request: Request) -> None:
        pass

    def _compute(self, request: Request, count: int) -> None:
        self.computed_tokens += count
        end = min(request.num_computed_tokens + count, request.num_tokens)
        for group, of_group in enumerate(self.of[request.request_id]):
            for layer, tensor in self._tensors():
                if self.states[group]:
                    tensor[of_group[(end - 1) // BLOCK]] = content(request, end - 1) + layer + STATE
                    continue
                for at in range(request.num_computed_tokens, end):
                    tensor[of_group[at // BLOCK], :, at % BLOCK] = content(request, at) + layer


class ApartStates(States, ApartGroups, ApartEngine):
    """With workers in other processes."""
