"""Sessions for the routing studies: document questions as in MemServe §8, and duplicates of them (Fig 15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.sim.routing_fleet import Session, Turn

__all__ = ["DocumentSessions"]

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DocumentSessions:
    """Long-document question answering after LooGLE (Table 7, Fig 7).

    Each session asks several questions about one document; its prompts contain the questions and answers before.

    Attributes:
        documents: How many; 80 sessions of roughly 250 requests in §8.4.
        document_tokens: Tokens of each; the paper takes the first 1k.
        questions_mean: Mean questions of a session, at least one and at most `questions_max`.
        questions_max: Five in the paper.
        question_tokens: Mean tokens of a question.
        answer_tokens: Mean tokens of an answer.
        vocab: Token ids are below that.
    """

    documents: int = 80
    document_tokens: int = 1000
    questions_mean: float = 3.1
    questions_max: int = 5
    question_tokens: int = 24
    answer_tokens: int = 20
    vocab: int = 32000

    def sessions(self, share: int, requests_per_s: float, seed: int, think_s: float = 0.0) -> list[Session]:
        """All sessions `share` times over, word for word the same, in random order at random times.

        Args:
            share: How often each is there: the share ratio.
            requests_per_s: Mean rate: sessions start as a Poisson process of this rate divided by their mean requests.
            seed: Determines everything that is drawn.
            think_s: As in Session.
        """
        if share < 1 or not requests_per_s > 0:
            raise ArgumentError(f"share is {share}, requests_per_s {requests_per_s}: at least 1, and above 0")
        random = np.random.default_rng(seed)
        turns = [self._turns(random) for _ in range(self.documents)]
        order = random.permutation(np.repeat(np.arange(self.documents), share))
        requests = share * sum(map(len, turns))
        gaps = random.exponential(requests / requests_per_s / len(order), len(order))
        starts = np.cumsum(gaps)
        return [
            Session(f"session {seed}-{at}", float(start), turns[document], think_s)
            for at, (document, start) in enumerate(zip(order.tolist(), starts.tolist(), strict=True))
        ]

    def _turns(self, random: np.random.Generator) -> Sequence[Turn]:
        chance = (self.questions_mean - 1) / (self.questions_max - 1)
        said = self._text(random, self.document_tokens)
        turns = []
        for _ in range(1 + int(random.binomial(self.questions_max - 1, chance))):
            question = self._text(random, 1 + int(random.poisson(self.question_tokens - 1)))
            answer = self._text(random, 1 + int(random.poisson(self.answer_tokens - 1)))
            prompt = np.concatenate([said, question])
            turns.append(Turn(prompt, answer))
            said = np.concatenate([prompt, answer])
        return turns

    def _text(self, random: np.random.Generator, tokens: int) -> Tokens:
        return random.integers(0, self.vocab, tokens, dtype=np.int32)
