"""What each of the processes does: one serves the request, the others lend it blocks. All run the same program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import kvpool
from long_context.context import BLOCK, Context, Creditor, Range
from long_context.engine import Engine
from long_context.model import Floats, Model, ModelConfig, Tokens


@dataclass(frozen=True)
class Progress:
    """How far the request is.

    Attributes:
        tokens: The tokens of the prompt and the answer that have their K and V.
        answered: The tokens of the answer so far.
        blocks: How many blocks of the request each process holds, by name.
        lost: The tokens whose creditor is gone. The request goes on after recompute().
    """

    tokens: int
    answered: int
    blocks: dict[str, int]
    lost: list[Range]


@dataclass(frozen=True)
class Answer:
    """All of an answer, and the logits that gave it: [token, vocabulary]."""

    tokens: list[int]
    logits: Floats


class Member:
    """A pool of one process, and the request that it serves, if it serves one."""

    imports: ClassVar[Sequence[str]] = ("numpy", "kvpool")

    def __init__(self, name: str, blocks: int, **settings: Any) -> None:
        self._name = name
        self._model = Model(ModelConfig(), seed=0)  # the same weights in all processes
        self.pool = kvpool.Pool(kv_layout(self._model.config), blocks, name=name, attend_threads=1, **settings)
        self._creditors: list[Creditor] = []

    def close(self) -> None:
        self.pool.close()

    # ---- peers

    def listen(self, address: str) -> str:
        return self.pool.peers.listen(address)

    def connect(self, address: str, within_s: float) -> str:
        """Meets the process that listens there."""
        return self.pool.peers.connect(address, timeout=within_s)

    def used_blocks(self) -> int:
        """The blocks of its pool that are not free: its own, and those that it has lent. The pool is audited."""
        hbm = self.pool.audit().hbm
        return hbm.capacity - hbm.free

    # ---- the request

    def begin(self, prompt: Tokens, creditors: list[Creditor]) -> None:
        self._creditors = creditors
        self._context = Context(self.pool, creditors)
        self._engine = Engine(self._model, self._context, prompt)

    def prefill(self, until: int) -> Progress:
        """Computes the prompt up to this token, or until a creditor is lost."""
        with contextlib.suppress(kvpool.PeerLost):
            self._engine.prefill(until)
        return self._progress()

    def decode(self, answer_tokens: int) -> Progress:
        """Continues the answer until it has so many tokens, or until a creditor is lost."""
        with contextlib.suppress(kvpool.PeerLost):
            while len(self._engine.logits) < answer_tokens:
                self._engine.decode()
        return self._progress()

    def recompute(self) -> tuple[int, float, Progress]:
        """Computes again what is lost. Returns how many tokens, in how many seconds, and where all are then."""
        started = time.perf_counter()
        count = self._engine.recompute()
        return count, time.perf_counter() - started, self._progress()

    def serve(self, prompt: Tokens, answer_tokens: int) -> Answer:
        """All of it, in this pool alone."""
        self.begin(prompt, [])
        self.prefill(len(prompt))
        self.decode(answer_tokens)
        return self.end()

    def end(self) -> Answer:
        """The whole answer. The request's blocks are free from now on, here and at the creditors."""
        self._context.close()
        count = len(self._engine.logits)
        return Answer(self._engine.tokens[-count:], np.array(self._engine.logits))

    def _progress(self) -> Progress:
        lent = {creditor.name: self._context.blocks_lent_by(creditor.name) for creditor in self._creditors}
        here = {self._name: self._context.blocks_here}
        return Progress(self._context.tokens, len(self._engine.logits), here | lent, self._context.lost)


def kv_layout(config: ModelConfig) -> kvpool.KVLayout:
    return kvpool.KVLayout(config.layers, config.kv_heads, config.head_dim, "float32", BLOCK)
