"""What an instance does with a prompt: the model's next token, over blocks of the pool.

    tokens   | cached | rest of the prompt | generated |
    table    | held   | owned              | owned     |     held: pinned, the index's or a peer's gift; owned: ours
                                                             to give to the index or to free

A design (designs.py) decides what becomes held, and what is sent; nothing here knows about it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from llama import Llama, PagedKV
from torch.utils.dlpack import from_dlpack

import kvpool
from pd_disaggregated.records import Tokens

Addresses = npt.NDArray[np.uint64]


class Pin(Protocol):
    """Blocks that stay where they are until it is closed: a kvpool.Match, Inserted or Received."""

    @property
    def addrs(self) -> Addresses: ...
    def close(self) -> None: ...


class Work:
    """A request at one instance: its tokens, and the blocks that hold their K and V. Not thread-safe.

    Attributes:
        table: Addresses of its blocks, in order.
        prompt_tokens: Of the tokens, those that were asked.
        kvpool_s: Seconds spent in calls of kvpool for it.
    """

    def __init__(self, pool: kvpool.Pool, prompt: Tokens, new_tokens: int) -> None:
        """Begins without blocks. The pool stays the caller's."""
        self.table: Addresses = np.empty(0, np.uint64)
        self.prompt_tokens = len(prompt)
        self.kvpool_s = 0.0
        self._pool = pool
        self._size = pool.kv_layout.block_tokens
        self._tokens = np.concatenate([prompt, np.zeros(new_tokens, np.int32)], dtype=np.int32)
        self._known = len(prompt)
        self._held = 0  # table[:_held] is pinned; table[_held:] is ours to free
        self._whole = 0
        self._pins: list[Pin] = []

    # ---- tokens

    @property
    def tokens(self) -> Tokens:
        """Prompt and answer as far as they are known."""
        return self._tokens[: self._known]

    @property
    def prompt(self) -> Tokens:
        """What was asked."""
        return self._tokens[: self.prompt_tokens]

    @property
    def answered(self) -> int:
        """Tokens of the answer that are known."""
        return self._known - self.prompt_tokens

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self._known == len(self._tokens)

    def append(self, token: int) -> None:
        """The next token of the answer."""
        self._tokens[self._known] = token
        self._known += 1

    # ---- blocks

    @property
    def held_blocks(self) -> int:
        """Blocks that are pinned: before anything was computed, those that need not be."""
        return self._held

    @property
    def whole_blocks(self) -> Addresses:
        """The full blocks whose K and V are final: what a cache can keep."""
        return self.table[: self._whole]

    @property
    def whole_tokens(self) -> Tokens:
        """The tokens in them."""
        return self._tokens[: self._whole * self._size]

    @property
    def early_blocks(self) -> Addresses:
        """All blocks of the prompt but that of its last token, with which its computation ends."""
        return self.table[: (self.prompt_tokens - 1) // self._size]

    @property
    def early_tokens(self) -> Tokens:
        """The tokens in them."""
        return self._tokens[: len(self.early_blocks) * self._size]

    def hold(self, pin: Pin) -> None:
        """The first blocks are those of the pin, which is closed with this."""
        self._pins.append(pin)
        addrs = pin.addrs
        self.table = np.concatenate([addrs, self.table[len(addrs) :]])
        self._held = max(self._held, len(addrs))
        self._whole = max(self._whole, len(addrs))

    def own(self, addrs: Addresses) -> None:
        """More blocks, which this frees."""
        self.table = np.concatenate([self.table, addrs])

    def grow(self) -> None:
        """Has a block for every known token.

        Raises:
            kvpool.OutOfBlocks: The pool is full of what is in use.
        """
        missing = -(-self._known // self._size) - len(self.table)
        if missing > 0:
            with self.calling_kvpool():
                self.own(self._pool.alloc(missing))

    def computed(self) -> None:
        """K and V of all known tokens are there."""
        self._whole = self._known // self._size

    def close(self) -> None:
        """Frees what is owned, and unpins what is held. Idempotent."""
        self._pool.free(self.table[self._held :])
        self.table = self.table[: self._held]
        while self._pins:
            self._pins.pop().close()

    @contextlib.contextmanager
    def calling_kvpool(self) -> Iterator[None]:
        """Counts the time of what is in it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.kvpool_s += time.perf_counter() - began

    def __enter__(self) -> Work:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes."""
        self.close()


class Engine:
    """A model over the memory of a pool."""

    def __init__(self, model: Llama, pool: kvpool.Pool) -> None:
        """Both stay the caller's."""
        self.model = model
        self._kv = PagedKV(from_dlpack(pool.tensor(kvpool.HBM)))

    def next_token(self, work: Work, on_layer: Callable[[int], None] | None = None) -> int:
        """Computes what is not computed yet, appends the next token to the work, and returns it. Greedy.

        Args:
            work: Has grown: there is a block for each of its tokens.
            on_layer: Called with each layer that is complete in all blocks.
        """
        block_ids = torch.from_numpy(kvpool.block_ids(work.table))
        first_block = min(len(work.whole_blocks), (len(work.tokens) - 1) // self.model.config.block_tokens)
        logits = self.model.forward(torch.from_numpy(work.tokens), self._kv, block_ids, first_block, on_layer)
        work.computed()
        token = int(logits.argmax())
        work.append(token)
        return token
