"""What each instance has cached of a prompt, as far as the dispatcher knows: from what it has sent there."""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np

from kvpool.policy.routing import PromptTree
from pd_disaggregated.fleet import Instance
from pd_disaggregated.records import Setting, Tokens
from pd_disaggregated.requests import Request


class PromptCaches:
    """The prompt tree of all instances (MemServe §6). What it says is a hint: an instance decides by its own match."""

    def __init__(self, instances: Collection[Instance], setting: Setting, block_tokens: int, hbm_blocks: int) -> None:
        """Takes all instances, what they run, and the size of the pool that each of them has."""
        self._setting = setting
        self._ids = {one: number for number, one in enumerate(instances)}
        self._joins: dict[Instance, int | None] = dict.fromkeys(instances)  # None: it is not there
        blocks = max(1, sum(one.prefills for one in instances) * hbm_blocks)  # they cannot hold more
        self._tree = PromptTree(block_tokens, time.monotonic, ttl_s=None, blocks_max=blocks)

    def follow(self) -> None:
        """Forgets what instances had that are gone, or have come back: these begin empty."""
        for one, number in self._ids.items():
            joins = one.joins if one.joined else None
            if self._joins[one] != joins:
                self._joins[one] = joins
                self._tree.forget(number)

    def missing(self, prompt: Tokens) -> dict[Instance, int]:
        """How many tokens of a prompt each instance has to compute: the last one in any case."""
        ids, lengths = self._tree.match(prompt[:-1])
        found = dict(zip(ids.tolist(), lengths.tolist(), strict=True))
        return {one: len(prompt) - found.get(number, 0) for one, number in self._ids.items()}

    def sent(self, prompt: Tokens, instance: Instance) -> None:
        """An instance that prefills has a prompt, or soon will."""
        if self._setting.keeps_prompts:
            self._tree.insert(prompt, self._ids[instance])

    def answered(self, request: Request) -> None:
        """Prefill has the answer as well, if it has decoded it or gets it back. Its last token has no KV."""
        if self._setting.keeps_answers and request.prefill is not None and request.prefill.joined:
            answer = np.array(request.tokens[:-1], np.int32)
            self._tree.insert(np.concatenate([request.prompt, answer]), self._ids[request.prefill])
