"""Computes a prompt and its answer on a context, and computes again what a creditor lost.

There is one rule. A token of the prompt is always computed in the tile of 16 that it stands in, and a token of the
answer always alone. So a token has the same K, V and logits whenever it is computed, and wherever the blocks of the
tokens before it are: kvpool's attention has the same bits for every placement that cuts a sequence at its leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from long_context.context import Context, PagedKV, Range
from long_context.model import Floats, Model, Tokens

TILE: Final = 16  # tokens of a prompt that are computed together: as many as Pool.attend takes


def steps(begin: int, end: int, prompt_tokens: int) -> Iterator[Range]:
    """The tokens that are computed together, one range after another, from `begin` to `end`.

    REQUIRES: in the prompt, `begin` and `end` are multiples of TILE, or the prompt's end.
    """
    while begin < end:
        behind = min(begin + TILE, prompt_tokens) if begin < prompt_tokens else begin + 1
        yield begin, behind
        begin = behind


class Engine:
    """Serves one request, a few tokens at a time.

    Where a method raises PeerLost, a creditor has died. Call recompute(), and then the same method again.

    Attributes:
        tokens: The prompt, and the answer as far as it has come.
        logits: Of each token of the answer, those that it was chosen by.
    """

    def __init__(self, model: Model, context: Context, prompt: Tokens) -> None:
        self.tokens: list[int] = prompt.tolist()
        self.logits: list[Floats] = []
        self._model = model
        self._context = context
        self._prompt_tokens = len(prompt)
        self._hidden: Floats | None = None  # what the last step gave

    def prefill(self, until: int) -> None:
        """Computes the prompt up to this token, or to its end."""
        self._compute(min(until, self._prompt_tokens))

    def decode(self) -> None:
        """Adds a token to the answer. REQUIRES: the prompt has been computed."""
        self._compute(len(self.tokens))
        assert self._hidden is not None
        self.logits.append(self._model.logits(self._hidden))
        self.tokens.append(int(np.argmax(self.logits[-1])))

    def recompute(self) -> int:
        """Computes K and V again for the tokens that are lost, and for no others. Returns how many.

        A token needs those before it, so the oldest leaf comes first. What is done stays done if another creditor dies.
        """
        count = 0
        while (leaf := self._context.first_lost_leaf()) is not None:
            with self._context.rebuilding(leaf) as kv:
                for begin, end in steps(*leaf, self._prompt_tokens):
                    self.step(kv, begin, end)
            count += leaf[1] - leaf[0]
        return count

    def _compute(self, end: int) -> None:
        for begin, behind in steps(self._context.tokens, end, self._prompt_tokens):
            self._hidden = self.step(self._context.with_room_for(behind), begin, behind)
            self._context.tokens = behind

    def step(self, kv: PagedKV, begin: int, end: int) -> Floats:
        """Runs tokens through the model, and writes their K and V. Returns [token, hidden]."""
        x = self._model.embed(np.array(self.tokens[begin:end], np.int32))
        for layer in range(self._model.config.layers):
            q, k, v = self._model.project(layer, x, begin)
            kv.write(layer, begin, k, v)
            x = self._model.finish_layer(layer, x, kv.attend(layer, q, end))
        return x
