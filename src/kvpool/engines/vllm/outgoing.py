"""The prompts that an engine sends to others: what of them each step makes whole. The scheduler's side."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.params import Announced, parts
from kvpool.engines.vllm.plans import GroupBlocks, SendPlan, ids, needed_from
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
    lacking: bool = False  # vLLM has dropped blocks before they could be sent


class Outgoing:
    """Plans what is sent. Not thread-safe.

    A prompt is sent as it is computed: each step that makes blocks of it whole sends all of them, and the receiver
    skips what it has. The last one carries the id by which the receiver knows that the prompt is complete.

    Each group of layers is sent by itself. Of one with a window only what the receiver's next token needs is sent: a
    tail, in the step that makes its last block whole, when vLLM has all of it. A prompt of such a model is sent without
    its last token, which the receiver computes in any case: so the tail ends where the receiver begins.
    """

    def __init__(self, target: Target, name: str, groups: Groups) -> None:
        """Of an engine.

        Args:
            target: Carries out.
            name: The engine's, in the cluster.
            groups: Of the model's layers.
        """
        self._target = target
        self._name = name
        self._groups = groups
        self._block_tokens = groups.block_tokens
        self._prompts: dict[str, _Prompt] = {}

    def add(self, tracked: Tracked, peer: str) -> None:
        """A request whose prompt goes to a member."""
        self._prompts[tracked.request.request_id] = _Prompt(tracked, peer)
        self._target.expect_sends_to(peer)

    def plan(self, request_id: str, count: int, blocks_of: Callable[[str], GroupBlocks]) -> list[SendPlan]:
        """What to send after a step that computes `count` tokens of a request, for each group."""
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.whole:
            return []
        request = prompt.tracked.request
        computed = request.num_computed_tokens + count
        if self._groups.windowed:
            end = (request.num_prompt_tokens - 1) // self._block_tokens
            full = min(computed // self._block_tokens, end)
            prompt.whole = full == end
        else:
            full = min(computed, request.num_prompt_tokens) // self._block_tokens
            prompt.whole = computed >= request.num_prompt_tokens
        if not full or (full <= prompt.planned and not prompt.whole):
            return []
        prompt.planned = max(full, prompt.planned)
        tokens = prompt.tracked.tokens.first(request, full * self._block_tokens)
        sends = []
        for group, of_group in enumerate(blocks_of(request_id)):
            first = 0
            if self._groups.windows[group] is not None:
                if not prompt.whole:
                    continue
                first = self._groups.first_needed(group, full)
                if needed_from(of_group[:full]) > first:
                    prompt.lacking = True
                    return []
            namespace, begin = prompt.tracked.namespace, prompt.tracked.tails.get(group, 0)
            digests = prompt.tracked.digests
            part = self._groups.part(group, namespace, tokens, first, digests)
            sends.append(
                SendPlan(
                    request_id,
                    part.namespace,
                    part.tokens,
                    ids(of_group[first:full]),
                    prompt.peer,
                    parts(prompt.id, len(self._groups))[group],
                    prompt.whole,
                    group,
                    self._groups.part(group, namespace, tokens, begin, digests) if first else None,
                )
            )
        return sends

    def restart(self, request_id: str) -> None:
        """A load has failed, and what the last step computed from it is wrong: it will be computed again."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            prompt.planned, prompt.whole, prompt.lacking = 0, False, False
            self._forget(prompt)

    def drop_computed(self) -> None:
        """What has been computed so far is not sent any more. What will be computed from the first token on is."""
        for request_id, prompt in list(self._prompts.items()):
            self.finish(request_id)
            if not prompt.tracked.request.num_computed_tokens:  # under a new id: the receiver may have the old prompt
                self._prompts[request_id] = _Prompt(prompt.tracked, prompt.peer)

    def announced(self, request_id: str) -> Announced | None:
        """What another engine must know of a prompt that was sent to it, or is being sent. None: it does not come."""
        prompt = self._prompts.get(request_id)
        if prompt is None or not prompt.whole or not prompt.planned or prompt.lacking:
            return None
        if any(self._target.send_failed(part) for part in parts(prompt.id, len(self._groups))):
            return None
        return Announced(self._name, prompt.id, prompt.planned * self._block_tokens)

    def finish(self, request_id: str) -> None:
        """The request has ended. What is being sent of it goes on."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._forget(prompt)

    # ----

    def _forget(self, prompt: _Prompt) -> None:
        for part in parts(prompt.id, len(self._groups)):
            self._target.forget_send(part)
