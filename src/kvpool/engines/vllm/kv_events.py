"""What the cache gains and loses, block by block, under vLLM's own hashes: for vLLM's KV events.

The pool's events name blocks by all tokens of their prompt. VLLM's name them by a chain of hashes, which each request
has computed already. So a request's hashes are kept from the plan of its save until the pool reports the blocks, and
each block's hash until it is gone. Prompts that another engine has sent have no request here: their hashes are computed
from their tokens, unless more than the tokens distinguishes them; then nothing is said of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.index import EventStream, RemovedEvent, StoredEvent

__all__ = ["Described", "KvEvents", "Removed", "Stored"]

_EXPECTED_MAX: Final = 4096  # prompts whose saves have not ended, or failed

HashBlock: TypeAlias = Callable[[bytes | None, Sequence[int]], bytes]
"""Of the hash of the block before (None for the first block) and a block's tokens."""


@dataclass(frozen=True)
class Described:
    """What a request knows of its blocks.

    Attributes:
        hashes: Of its whole blocks, from the first on.
        extra_keys: What else their hashes depend on, one for each block; None: on nothing.
        lora: Number and name of its adapter.
    """

    hashes: Sequence[bytes]
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    lora: tuple[int, str] | None = None


class Stored(NamedTuple):
    """Blocks that follow each other were cached.

    Attributes:
        hashes: Of each.
        parent: The hash of the block before them; None where they begin the prompt.
        tokens: Of all of them.
        extra_keys: As in Described, of these.
        lora: As in Described.
    """

    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    extra_keys: list[tuple[Any, ...] | None] | None
    lora: tuple[int, str] | None


class Removed(NamedTuple):
    """Blocks are cached no more."""

    hashes: list[bytes]


class KvEvents:
    """Translates a pool's events. Not thread-safe.

    Args:
        stream: The pool's events, from its first block on.
        block_tokens: Tokens in a block.
        hash_block: VLLM's hash of a block.
    """

    def __init__(self, stream: EventStream, block_tokens: int, hash_block: HashBlock) -> None:
        self._stream = stream
        self._block_tokens = block_tokens
        self._hash_block = hash_block
        self._expected: OrderedDict[int, Described] = OrderedDict()
        self._hashes: dict[int, bytes] = {}  # by where a block lies
        self._lost = 0

    def saving(self, namespace: str, tokens: npt.NDArray[np.int32], described: Described) -> None:
        """This prompt of whole blocks will be saved."""
        key = _key(namespace, tokens)
        self._expected[key] = described
        self._expected.move_to_end(key)
        if len(self._expected) > _EXPECTED_MAX:
            self._expected.popitem(last=False)

    def take(self) -> list[Stored | Removed]:
        """What has happened since the last call, in order."""
        happened: list[Stored | Removed] = []
        events = self._stream.drain()
        if self._stream.lost > self._lost:  # nobody knows what has gone: better too little is believed to be here
            self._lost = self._stream.lost
            happened += [Removed(list(self._hashes.values()))] if self._hashes else []
            self._hashes.clear()
        for event in events:
            if isinstance(event, StoredEvent):
                happened += self._stored(event)
            elif isinstance(event, RemovedEvent):
                gone = [self._hashes.pop(where) for where in event.addrs.tolist() if where in self._hashes]
                happened += [Removed(gone)] if gone else []
        return happened

    # ----

    def _stored(self, event: StoredEvent) -> list[Stored | Removed]:
        described = self._expected.pop(_key(event.namespace, event.tokens), None) or self._computed(event)
        first, end = event.first_block, event.first_block + len(event.addrs)
        if described is None or len(described.hashes) < end:
            return []
        hashes = list(described.hashes[first:end])
        self._hashes.update(zip(event.addrs.tolist(), hashes, strict=True))
        extra = None if described.extra_keys is None else list(described.extra_keys[first:end])
        tokens = event.tokens[first * self._block_tokens : end * self._block_tokens].tolist()
        return [Stored(hashes, described.hashes[first - 1] if first else None, tokens, extra, described.lora)]

    def _computed(self, event: StoredEvent) -> Described | None:
        """Of a prompt that no request here has. None: what its namespace stands for is not known."""
        if event.namespace:
            return None
        hashes: list[bytes] = []
        tokens = event.tokens.tolist()
        for start in range(0, len(tokens), self._block_tokens):
            hashes.append(self._hash_block(hashes[-1] if hashes else None, tokens[start : start + self._block_tokens]))
        return Described(hashes)


def _key(namespace: str, tokens: npt.NDArray[np.int32]) -> int:
    return hash((namespace, tokens.tobytes()))
