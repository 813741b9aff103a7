"""What the cache gains and loses, block by block, under vLLM's own hashes: for vLLM's KV events.

The pool's events name blocks by all tokens of their prompt. VLLM's name them by a chain of hashes, which each request
has computed already. So a request's hashes are kept from the plan of its save until the pool reports the blocks, and
each block's hash until it is gone. Prompts that another engine has sent have no request here: their hashes are computed
from their tokens, unless more than the tokens distinguishes them; then nothing is said of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.errors import ClosedError, PeerLost
from kvpool.index import EventStream, RemovedEvent, StoredEvent

__all__ = ["Described", "KvEvents", "Removed", "Stored"]

_EXPECTED_MAX: Final = 512  # prompts whose saves have not ended, or failed

HashBlock: TypeAlias = Callable[[bytes | None, Sequence[int]], bytes]
"""Of the hash of the block before (None for the first block) and a block's tokens."""


@dataclass(frozen=True)
class Described:
    """What a request knows of its blocks.

    Attributes:
        hashes: Of its whole blocks, from the first on. The request's own list, which may grow.
        extra_keys: What else the hashes of the blocks [first, end) depend on, one for each; None: on nothing.
        lora: Number and name of its adapter.
    """

    hashes: Sequence[bytes]
    extra_keys: Callable[[int, int], list[tuple[Any, ...] | None]] | None = None
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

    A hash is told as stored with its first block and as removed with its last one: blocks of different prompts may have
    the same, where more than vLLM's hash distinguishes the prompts.

    Args:
        subscribe: Subscribes to the pool's events; with True, what is cached already comes first.
        block_tokens: Tokens in a block.
        hash_block: VLLM's hash of a block.
    """

    def __init__(self, subscribe: Callable[[bool], EventStream], block_tokens: int, hash_block: HashBlock) -> None:
        self._subscribe = subscribe
        self._stream: EventStream | None = subscribe(False)
        self._block_tokens = block_tokens
        self._hash_block = hash_block
        self._expected: OrderedDict[int, Described] = OrderedDict()
        self._hashes: dict[int, bytes] = {}  # by where a block lies
        self._blocks: Counter[bytes] = Counter()  # of each hash

    def saving(self, namespace: str, tokens: npt.NDArray[np.int32], described: Described) -> None:
        """This prompt of whole blocks will be saved."""
        key = _key(namespace, tokens)
        self._expected[key] = described
        self._expected.move_to_end(key)
        if len(self._expected) > _EXPECTED_MAX:
            self._expected.popitem(last=False)

    def take(self) -> list[Stored | Removed]:
        """What has happened since the last call, in order. After the pool is lost: that all is gone, once."""
        if self._stream is None:
            return []
        try:
            events = self._stream.drain()
            if self._stream.lost:
                return self._start_again()
        except (PeerLost, ClosedError):
            self._stream = None
            return self._removed(list(self._hashes))
        happened: list[Stored | Removed] = []
        for event in events:
            if isinstance(event, StoredEvent):
                happened += self._stored(event)
            elif isinstance(event, RemovedEvent):
                happened += self._removed(event.addrs.tolist())
        return happened

    # ----

    def _start_again(self) -> list[Stored | Removed]:
        """Events were lost: removes what is cached no more, and adds what is new."""
        assert self._stream is not None
        self._stream.close()
        self._stream = self._subscribe(True)
        cached = [event for event in self._stream.drain() if isinstance(event, StoredEvent)]
        there = {where for event in cached for where in event.addrs.tolist()}
        happened = self._removed([where for where in self._hashes if where not in there])
        for event in cached:
            happened += self._stored(event)
        return happened

    def _stored(self, event: StoredEvent) -> list[Stored | Removed]:
        described = self._expected.pop(_key(event.namespace, event.tokens), None) or self._computed(event)
        first, end = event.first_block, event.first_block + len(event.addrs)
        if described is None or len(described.hashes) < end:
            return []
        hashes = list(described.hashes[first:end])
        where = event.addrs.tolist()
        happened = self._removed(
            [at for at, new in zip(where, hashes, strict=True) if self._hashes.get(at, new) != new]
        )
        new = [each for at, each in zip(where, hashes, strict=True) if at not in self._hashes]
        known = all(self._blocks[each] for each in hashes)
        self._blocks.update(new)
        self._hashes.update(zip(where, hashes, strict=True))
        if known:
            return happened
        extra = None if described.extra_keys is None else described.extra_keys(first, end)
        tokens = event.tokens[first * self._block_tokens : end * self._block_tokens].tolist()
        parent = described.hashes[first - 1] if first else None
        return [*happened, Stored(hashes, parent, tokens, extra, described.lora)]

    def _removed(self, addrs: Sequence[int]) -> list[Stored | Removed]:
        gone = []
        for where in addrs:
            each = self._hashes.pop(where, None)
            if each is None:
                continue
            self._blocks[each] -= 1
            if not self._blocks[each]:
                del self._blocks[each]
                gone.append(each)
        return [Removed(gone)] if gone else []

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
