"""What one process, with one engine, generates: every design must generate the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llama import Llama, LlamaConfig
from serving import Engine, kv_layout

import kvpool
from pd_disaggregated.records import Answer, Session, Tokens


class WrongTokens(AssertionError):
    """A run has generated something else than a single process. It is a bug."""


class Reference:
    """The engine of serving.py, in this process. Remembers what it has generated: one serves the runs of all designs.

    Uses one thread of PyTorch, as the instances do: with several, sums are rounded in another way.
    """

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        """Takes the model's shape, and the seed of its weights, which must be those of the runs."""
        torch.set_num_threads(1)
        blocks = 4 * config.tokens_max // config.block_tokens
        self.config = config
        self.seed = seed
        self._pool = kvpool.Pool(kv_layout(config), blocks)
        self._engine = Engine(Llama(config, seed=seed), self._pool)
        self._known: dict[tuple[bytes, int], tuple[int, ...]] = {}

    def tokens(self, prompt: Tokens, new_tokens: int) -> tuple[int, ...]:
        """What it generates."""
        key = (prompt.tobytes(), new_tokens)
        if key not in self._known:
            self._known[key] = tuple(self._engine.serve(prompt, new_tokens).tokens)
        return self._known[key]

    def check(self, sessions: Sequence[Session], answers: Sequence[Answer]) -> None:
        """Compares every token.

        Raises:
            WrongTokens: One differs, or an answer is missing.
        """
        given = {(answer.session, answer.turn): answer.tokens for answer in answers}
        for session in sessions:
            past = session.prefix
            for number, turn in enumerate(session.turns):
                prompt = np.concatenate([past, turn.added], dtype=np.int32)
                right = self.tokens(prompt, turn.new_tokens)
                if given.get((session.number, number)) != right:
                    raise WrongTokens(
                        f"session {session.number}, turn {number}: one process generates {right}, "
                        f"the run {given.get((session.number, number))}"
                    )
                if session.remembers:
                    past = np.concatenate([prompt, np.array(right, np.int32)], dtype=np.int32)

    def close(self) -> None:
        """Ends its pool. Idempotent."""
        self._pool.close()
