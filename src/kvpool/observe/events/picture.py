"""A copy of the blocks that a publisher of KV events holds, which translates its events for a prompt index.

A wire event names blocks by hashes, a prompt index by all tokens from the prompt's start. So every reported block is
kept with its tokens and the block before it. Blocks may be stored and removed in any order, as vLLM does; the index is
told of those whose whole prefix is stored.

Invariants
  V1  A block is live if and only if it is in some medium, the block before it is live or it is the first of its prompt,
      and only tokens and namespace distinguish it from others. Between two batches the index holds exactly the live
      blocks.
  V2  A block that is in no medium and has no block after it is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

import numpy as np

from kvpool.index import RemovedEvent, StoredEvent
from kvpool.observe.events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, WireEvent

__all__ = ["FollowsEvents", "Picture"]

_NO_ADDRS: Final = np.empty(0, np.uint64)  # the addresses of another process mean nothing here
_UNSAID: Final = "?"  # the medium of a publisher that names none


class FollowsEvents(Protocol):
    """An index that an `EventSubscriber` can feed, such as `kvpool.policy.routing.PromptTree`."""

    def apply(self, instance: int, event: StoredEvent | RemovedEvent, /) -> object:
        """Applies an event of an instance. The event has no addresses."""

    def forget(self, instance: int, /) -> object:
        """Forgets everything of the instance."""


class _Block:
    """One block of the publisher, or one that another names as the block before it (then in no medium).

    `extra` is the namespace that the publisher gives it, None where it says nothing and that of the block before holds,
    False where something stands there that no namespace can express.
    """

    __slots__ = ("after", "before", "extra", "hash", "live", "media", "namespace", "rooted", "tokens")

    def __init__(self, name: BlockHash) -> None:
        self.hash = name
        self.before: _Block | None = None
        self.rooted = False
        self.after: dict[BlockHash, _Block] = {}
        self.tokens: np.ndarray[Any, np.dtype[np.int32]] | None = None
        self.extra: str | bool | None = None
        self.media: set[str] = set()
        self.live = False
        self.namespace = ""


class Picture:
    """Follows the events of one publisher, and applies them to an index. Not thread-safe.

    It needs memory for each block that the publisher holds: its tokens, and some 500 bytes.

    Args:
        target: The index.
        instance: The instance id of the publisher in the index.
        block_tokens: Tokens a block; ignores events of another size.
    """

    def __init__(self, target: FollowsEvents, instance: int, block_tokens: int) -> None:
        self._target = target
        self._instance = instance
        self._block_tokens = block_tokens
        self._blocks: dict[BlockHash, _Block] = {}
        self._sequence = 0
        self.left_out = 0

    def __len__(self) -> int:
        """The number of live blocks."""
        return sum(block.live for block in self._blocks.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the publisher is known."""
        return not self._blocks

    def clear(self) -> None:
        """Forgets all blocks of the publisher."""
        self._blocks.clear()
        self._target.forget(self._instance)

    def apply(self, events: Iterable[WireEvent]) -> None:
        """Applies the events of a batch."""
        gone: list[_Block] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                gone.clear()
                self.clear()
            elif event.group_idx not in (None, 0):
                self.left_out += len(event.block_hashes)  # layers of another kind keep other blocks
            elif isinstance(event, BlockRemoved):
                gone += self._take_out(event)
            elif event.block_size == self._block_tokens:
                self._put_in(event)
            else:
                self.left_out += len(event.block_hashes)
        # At the end of a batch: a block that moves to another medium is reported as removed first.
        for block in gone:
            if not block.media:
                self._sink(block)
                self._drop(block)

    def _put_in(self, event: BlockStored) -> None:
        size = self._block_tokens
        before = None if event.parent_block_hash is None else self._named(event.parent_block_hash)
        for position, name in enumerate(event.block_hashes):
            block = self._named(name)
            if block.tokens is None:
                block.tokens = event.token_ids[position * size : (position + 1) * size]
                block.extra = _extra(event, position)
                block.rooted = before is None
                block.before = before
                if before is not None:
                    before.after[name] = block
            block.media.add(event.medium or _UNSAID)
            before = block
        self._raise([self._blocks[name] for name in event.block_hashes])

    def _named(self, name: BlockHash) -> _Block:
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(name)
        return block

    def _take_out(self, event: BlockRemoved) -> list[_Block]:
        found = [block for block in map(self._blocks.get, event.block_hashes) if block is not None]
        for block in found:
            if event.medium is None:
                block.media.clear()
            else:
                block.media -= {event.medium, _UNSAID}
        return [block for block in found if not block.media]

    def _raise(self, run: list[_Block]) -> None:
        """Makes live what can be of these blocks and of those behind them, and tells the index of each new path."""
        waiting = run[::-1]
        while waiting:
            block = waiting.pop()
            risen = not block.live and self._rise(block)
            below = [child for child in block.after.values() if not child.live] if block.live else []
            waiting += below
            if risen and not any(self._can_rise(child) for child in below):
                self._tell_stored(block)

    def _can_rise(self, block: _Block) -> bool:
        if not block.media or block.extra is False:
            return False
        if block.rooted:
            return True
        before = block.before
        return before is not None and before.live and block.extra in (None, before.namespace)

    def _rise(self, block: _Block) -> bool:
        if not self._can_rise(block):
            return False
        block.live = True
        block.namespace = block.before.namespace if block.before is not None else str(block.extra or "")
        return True

    def _sink(self, top: _Block) -> None:
        """Marks the block, and those behind it, as no longer live."""
        if not top.live:
            return
        self._sequence += 1
        tokens, depth = _prefix(top)
        self._target.apply(self._instance, RemovedEvent(self._sequence, top.namespace, tokens, depth - 1, _NO_ADDRS))
        waiting = [top]
        while waiting:
            block = waiting.pop()
            block.live = False
            waiting += [child for child in block.after.values() if child.live]

    def _tell_stored(self, block: _Block) -> None:
        self._sequence += 1
        tokens, _ = _prefix(block)
        self._target.apply(self._instance, StoredEvent(self._sequence, block.namespace, tokens, 0, _NO_ADDRS))

    def _drop(self, block: _Block) -> None:
        """Forgets a block that is in no medium, and those before it that were kept for its sake alone."""
        here: _Block | None = block
        while here is not None and not here.media and not here.after and self._blocks.pop(here.hash, False):
            before = here.before
            if before is not None:
                del before.after[here.hash]
            here = before


def _prefix(block: _Block) -> tuple[np.ndarray[Any, np.dtype[np.int32]], int]:
    """All tokens from the start of the prompt to the end of a live block, and how many blocks that is."""
    parts = []
    here: _Block | None = block
    while here is not None:
        assert here.tokens is not None
        parts.append(here.tokens)
        here = here.before
    return np.concatenate(parts[::-1]), len(parts)


def _extra(event: BlockStored, position: int) -> str | bool | None:
    """The namespace that an event gives one of its blocks. kvpool and vLLM (salts, adapters) say it as an extra key."""
    keys = event.extra_keys[position] if event.extra_keys is not None else None
    if keys:
        only = keys[0] if len(keys) == 1 else None
        return only if isinstance(only, str) else False
    if event.extra_keys is None and event.lora_name is not None:
        return event.lora_name
    if event.lora_id is not None and event.lora_name is None:
        return False  # a number that another publisher may give to another adapter
    return None
