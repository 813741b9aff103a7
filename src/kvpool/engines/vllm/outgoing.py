"""The prompts that an engine sends to others: what of them each step makes whole. The scheduler's side."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.engines.vllm.params import Announced
from kvpool.engines.vllm.plans import SendPlan, ids
from kvpool.engines.vllm.requests import Tracked

__all__ = ["Outgoing", "Target"]

_ID_BYTES = 8


class Target(Protocol):
    """Where plans are carried out."""

    def expect_sends_to(self, peer: str) -> None:
        """There will be sends to this member."""

    def send_failed(self, number: str) -> bool:
        """Whether a send of this id has failed already."""

    def forget_send(self, number: str) -> None:
        """Nobody will ask about this id any more."""


@dataclass
class _Prompt:
    tracked: Tracked
    peer: str
    id: str = field(default_factory=lambda: secrets.token_hex(_ID_BYTES))
    planned: int = 0  # blocks from the first on
    whole: bool = False  # the plan of its last blocks was made


class Outgoing:
    """Plans what is sent. Not thread-safe.

    A prompt is sent as it is computed: each step that makes blocks of it whole sends all of them, and the receiver
    skips what it has. The last one carries the id by which the receiver knows that the prompt is complete.
    """

    def __init__(self, target: Target, name: str, block_tokens: int) -> None:
        """Of an engine.

        Args:
            target: Carries out.
            name: The engine's, in the cluster.
            block_tokens: Tokens in a block.
        """
        self._target = target
        self._name = name
        self._block_tokens = block_tokens
        self._prompts: dict[str, _Prompt] = {}

    def add(self, tracked: Tracked, peer: str) -> None:
        """A request whose prompt goes to a member."""
        self._prompts[tracked.request.request_id] = _Prompt(tracked, peer)
        self._target.expect_sends_to(peer)

    def plan(self, request_id: str, count: int, blocks_of: Callable[[str], Sequence[int]]) -> SendPlan | None:
        """What to send after a step that computes `count` tokens of a request; None: nothing."""
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.whole:
            return None
        request = prompt.tracked.request
        computed = request.num_computed_tokens + count
        prompt.whole = computed >= request.num_prompt_tokens
        full = min(computed, request.num_prompt_tokens) // self._block_tokens
        if not full or (full <= prompt.planned and not prompt.whole):
            return None
        prompt.planned = max(full, prompt.planned)
        return SendPlan(
            request_id,
            prompt.tracked.namespace,
            prompt.tracked.tokens.first(request, full * self._block_tokens),
            ids(blocks_of(request_id)[:full]),
            prompt.peer,
            prompt.id,
            prompt.whole,
        )

    def restart(self, request_id: str) -> None:
        """A load has failed, and what the last step computed from it is wrong: it will be computed again."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            prompt.planned, prompt.whole = 0, False
            self._target.forget_send(prompt.id)

    def drop_computed(self) -> None:
        """What has been computed so far is not sent any more. What will be computed from the first token on is."""
        for request_id, prompt in list(self._prompts.items()):
            self.finish(request_id)
            if not prompt.tracked.request.num_computed_tokens:  # under a new id: the receiver may have the old prompt
                self._prompts[request_id] = _Prompt(prompt.tracked, prompt.peer)

    def announced(self, request_id: str) -> Announced | None:
        """What another engine must know of a prompt that was sent to it, or is being sent. None: it does not come."""
        prompt = self._prompts.get(request_id)
        if prompt is None or not prompt.whole or not prompt.planned or self._target.send_failed(prompt.id):
            return None
        return Announced(self._name, prompt.id, prompt.planned * self._block_tokens)

    def finish(self, request_id: str) -> None:
        """The request has ended. What is being sent of it goes on."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._target.forget_send(prompt.id)
