"""A copy of the blocks that a publisher of KV events holds, which translates its events for a prompt index.

A wire event names blocks by hashes, a prompt index by all tokens from the prompt's start. So every reported block is
kept with its tokens and the block before it. Blocks may be stored and removed in any order, as vLLM does; the index is
told of those whose whole prefix is stored.

An index takes whole prefixes, so telling it of the end of a prompt costs as much as the prompt is long. Therefore the
index is told of new blocks only when they are at least a 32nd of their prefix. The others wait for the next such block,
or for `catch_up`, which a subscriber calls when nothing else is to be done, and ten times a second if that is never. So
what is matched is at most a 32nd too short meanwhile, and the work for a block does not grow with its prompt.

Invariants
  V1  A block is live if and only if it is in some medium, the block before it is live or it is the first of its prompt,
      and only tokens and namespace distinguish it from others. Between two batches the index holds exactly the paths
      of the told blocks. A told block is live, and so is the block before it told. After `catch_up` all live blocks
      are told.
  V2  A block that is in no medium and has no block after it is not kept.
  V3  Between two batches there are at most `blocks_max` blocks. `_ends` has exactly those without a block after them.
  V4  Several blocks may have one path, that is the same tokens from the start of the prompt in one namespace: engines
      hash more than that. `_told` counts the told blocks of each path. Behind a path of none the index has nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np

from kvpool.index import RemovedEvent, StoredEvent
from kvpool.index.adapters import adapter_namespace
from kvpool.observe.events.apart import Apart, apart, shared
from kvpool.observe.events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, WireEvent

__all__ = ["BLOCKS_MAX", "FollowsEvents", "Picture"]

BLOCKS_MAX: Final = 1 << 18  # some 200 MiB with blocks of 16 tokens

_NO_ADDRS: Final = np.empty(0, np.uint64)  # the addresses of another process mean nothing here
_UNSAID: Final = "?"  # the medium of a publisher that names none
_MEDIA_MAX: Final = 8  # of a block
_STRIDE: Final = 32  # a path is told when its untold end is at least this part of it
_DROP_PART: Final = 64  # of the most blocks: so many are dropped at once, so that long prompts are sunk in one go
_CATCH_UP_BLOCKS: Final = 1 << 16  # of work in one call of `catch_up`: milliseconds


class FollowsEvents(Protocol):
    """An index that an `EventSubscriber` can feed, such as `kvpool.policy.routing.PromptTree`."""

    def apply(self, instance: int, event: StoredEvent | RemovedEvent, /) -> object:
        """Applies an event of an instance. The event has no addresses."""

    def forget(self, instance: int, /) -> object:
        """Forgets everything of the instance."""


class _Block:
    """One block of the publisher, or one that another names as the block before it (then in no medium).

    `extra` is the adapter and the salt that the publisher gives it: the salt is None where it says nothing, and that of
    the block before holds. It is None where something stands there that no namespace can express.
    """

    __slots__ = (
        "adapter",
        "after",
        "before",
        "depth",
        "extra",
        "hash",
        "live",
        "media",
        "path",
        "rooted",
        "salt",
        "tokens",
        "told",
        "untold"
    )  # fmt: skip

    def __init__(self, name: BlockHash) -> None:
        self.hash = name
        self.before: _Block | None = None
        self.rooted = False
        self.after: dict[BlockHash, _Block] = {}
        self.tokens: bytes | None = None  # int32; a copy, which keeps no message alive
        self.extra: Apart | None = None
        self.media: frozenset[str] = frozenset()
        self.live = False
        self.adapter = self.salt = ""  # while it is live
        self.path = 0  # the same for all blocks of one path, and no others; while it is live
        self.depth = 0  # blocks from the start of the prompt to here; while it is live
        self.told = False
        self.untold = 0  # of these blocks, at the end, when it became live


class Picture:
    """Follows the events of one publisher, and applies them to an index. Not thread-safe.

    It needs memory for each block that the publisher holds: its tokens, and some 700 bytes.

    Args:
        target: The index.
        instance: The instance id of the publisher in the index.
        block_tokens: Tokens a block; ignores events of another size.
        blocks_max: The most blocks that are kept; beyond it those stored longest ago are dropped, ends of prompts
            first.
        on_adapter: Is told the adapter of each event that names one.

    Attributes:
        left_out: Ignored blocks: of another size, or of layers of another kind.
        dropped: Blocks that were dropped because there were too many.
    """

    def __init__(
        self,
        target: FollowsEvents,
        instance: int,
        block_tokens: int,
        blocks_max: int = BLOCKS_MAX,
        on_adapter: Callable[[str], object] | None = None,
    ) -> None:
        self._target = target
        self._instance = instance
        self._block_tokens = block_tokens
        self._blocks_max = blocks_max
        self._on_adapter = on_adapter
        self._blocks: dict[BlockHash, _Block] = {}
        self._ends: OrderedDict[BlockHash, _Block] = OrderedDict()  # stored longest ago first
        self._told: dict[int, int] = {}  # how many told blocks a path has; from 1
        self._waiting: dict[_Block, None] = {}  # ends of paths of which the index is not told yet
        self._credit = 0  # blocks of prefixes that may be told: what new blocks have paid for
        self._sequence = 0
        self.left_out = 0
        self.dropped = 0

    def __len__(self) -> int:
        """The number of live blocks."""
        return sum(block.live for block in self._blocks.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the publisher is known."""
        return not self._blocks

    @property
    def is_caught_up(self) -> bool:
        """Whether the index holds all live blocks."""
        return not self._waiting

    def clear(self) -> None:
        """Forgets all blocks of the publisher."""
        self._blocks.clear()
        self._ends.clear()
        self._told.clear()
        self._waiting.clear()
        self._target.forget(self._instance)

    def apply(self, events: Iterable[WireEvent]) -> None:
        """Applies the events of a batch."""
        gone: dict[_Block, None] = {}
        for event in events:
            if isinstance(event, AllBlocksCleared):
                gone.clear()
                self.clear()
            elif event.group_idx not in (None, 0):
                self.left_out += len(event.block_hashes)  # layers of another kind keep other blocks
            elif isinstance(event, BlockRemoved):
                gone |= self._take_out(event)
            elif event.block_size == self._block_tokens:
                self._put_in(event)
            else:
                self.left_out += len(event.block_hashes)
        # At the end of a batch: a block that moves to another medium is reported as removed first.
        self._let_go([block for block in gone if not block.media and self._blocks.get(block.hash) is block])

    def catch_up(self) -> None:
        """Tells the index of some paths that wait; after enough calls of all."""
        work = 0
        while self._waiting and work < _CATCH_UP_BLOCKS:
            block = next(iter(self._waiting))
            work += block.depth
            self._tell_stored(block)

    # ---- blocks

    def _put_in(self, event: BlockStored) -> None:
        size = self._block_tokens
        names = event.block_hashes[: self._blocks_max]
        medium = _only(event.medium or _UNSAID)
        if event.lora_name and self._on_adapter is not None:
            self._on_adapter(event.lora_name)
        self.dropped += len(event.block_hashes) - len(names)
        before = None if event.parent_block_hash is None or not names else self._named(event.parent_block_hash)
        for position, name in enumerate(names):
            block = self._named(name)
            if block.tokens is None:
                block.tokens = event.token_ids[position * size : (position + 1) * size].tobytes()
                block.extra = shared(apart(event, position), None if before is None else before.extra)
                block.rooted = before is None
                block.before = before
                if before is not None:
                    before.after[name] = block
                    self._ends.pop(before.hash, None)
            if not block.media:
                block.media = medium
            elif len(block.media) < _MEDIA_MAX:
                block.media |= medium
            if name in self._ends:
                self._ends.move_to_end(name)
            before = block
        self._raise([self._blocks[name] for name in names])
        if len(self._blocks) > self._blocks_max:
            self._shrink()

    def _named(self, name: BlockHash) -> _Block:
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = self._ends[name] = _Block(name)
        return block

    def _take_out(self, event: BlockRemoved) -> dict[_Block, None]:
        found = [block for block in map(self._blocks.get, event.block_hashes) if block is not None]
        for block in found:
            block.media = frozenset() if event.medium is None else block.media - {event.medium, _UNSAID}
        return {block: None for block in found if not block.media}

    def _let_go(self, gone: list[_Block]) -> None:
        """Forgets blocks that are in no medium.

        Beginnings of prompts sink first: the index forgets what is behind them along with them. All of them sink before
        any is dropped: dropping a block drops blocks before it, which may be live until they sink.
        """
        for block in sorted(gone, key=lambda block: block.depth):
            self._sink(block)
        for block in gone:
            if self._blocks.get(block.hash) is block:
                self._drop(block)

    def _drop(self, block: _Block) -> None:
        """Forgets a block that is in no medium, and those before it that were kept for its sake alone."""
        here: _Block | None = block
        while here is not None and not here.media and not here.after and self._blocks.pop(here.hash, False):
            self._ends.pop(here.hash, None)
            here = self._unlink(here)

    def _unlink(self, block: _Block) -> _Block | None:
        """Takes a block from behind the one before it, which it returns."""
        before = block.before
        if before is not None:
            del before.after[block.hash]
            if not before.after:
                self._ends[before.hash] = before
        return before

    def _shrink(self) -> None:
        """Drops the oldest blocks until there is room again."""
        most = self._blocks_max - self._blocks_max // _DROP_PART
        while len(self._blocks) > most:
            if not self._ends:  # parents in a circle, which no engine has
                self.dropped += len(self._blocks)
                self.clear()
                return
            _, top = self._ends.popitem(last=False)
            run = [top]
            while len(self._blocks) - len(run) > most and top.before is not None and len(top.before.after) == 1:
                top = top.before
                run.append(top)
            self._sink(top)
            for block in run:
                del self._blocks[block.hash]
            self.dropped += len(run)
            before = self._unlink(top)
            if before is not None and not before.after:
                if before.media:
                    self._ends.move_to_end(before.hash, last=False)  # the rest of this prompt goes first
                else:
                    self._drop(before)

    # ---- what is live, and what the index is told

    def _raise(self, run: list[_Block]) -> None:
        """Makes live what can be of these blocks and of those behind them, and tells the index of each new path."""
        waiting = run[::-1]
        while waiting:
            block = waiting.pop()
            if block.live or not self._rise(block):
                continue
            below = [child for child in block.after.values() if not child.live]
            waiting += below
            if not any(self._can_rise(child) for child in below):
                self._path_grew(block)

    def _can_rise(self, block: _Block) -> bool:
        if not block.media or block.extra is None:
            return False
        if block.rooted:
            return True
        before, (adapter, salt) = block.before, block.extra
        return before is not None and before.live and adapter == before.adapter and salt in (None, before.salt)

    def _rise(self, block: _Block) -> bool:
        if not self._can_rise(block):
            return False
        before = block.before
        block.live = True
        block.untold = 1
        assert block.extra is not None
        block.adapter, salt = block.extra
        if before is None:
            block.salt, block.depth = salt or "", 1
            block.path = hash((block.adapter, block.salt, block.tokens))
        else:
            block.salt, block.depth = before.salt, before.depth + 1
            block.path = hash((before.path, block.tokens))
            if not before.told:
                block.untold += before.untold
                self._waiting.pop(before, None)  # it is told together with this one
        self._credit += _STRIDE + 1
        return True

    def _path_grew(self, end: _Block) -> None:
        """A path ends at this block, which is new."""
        if end.untold * _STRIDE >= end.depth and self._credit >= end.depth:
            self._credit -= end.depth
            self._tell_stored(end)
        else:
            self._waiting[end] = None

    def _sink(self, top: _Block) -> None:
        """Marks the block, and those behind it, as no longer live."""
        if not top.live:
            return
        waiting = [(top, False)]
        while waiting:
            block, removed = waiting.pop()
            if block.told and self._untell(block) and not removed:
                self._tell_removed(block)
                removed = True  # and all behind it
            block.live = block.told = False
            self._waiting.pop(block, None)
            waiting += [(child, removed) for child in block.after.values() if child.live]
        before = top.before
        if before is not None and before.live and not before.told:
            self._waiting[before] = None  # it waited together with this one

    def _untell(self, block: _Block) -> bool:
        """A told block is no longer live. Returns whether its path has no other."""
        left = self._told[block.path] - 1
        if left:
            self._told[block.path] = left
        else:
            del self._told[block.path]
        return not left

    def _tell_removed(self, block: _Block) -> None:
        self._sequence += 1
        removed = RemovedEvent(self._sequence, _namespace(block), _prefix(block), block.depth - 1, _NO_ADDRS)
        self._target.apply(self._instance, removed)

    def _tell_stored(self, block: _Block) -> None:
        if block.path not in self._told:
            self._sequence += 1
            stored = StoredEvent(self._sequence, _namespace(block), _prefix(block), 0, _NO_ADDRS)
            self._target.apply(self._instance, stored)
        here: _Block | None = block
        while here is not None and not here.told:
            here.told = True
            self._told[here.path] = self._told.get(here.path, 0) + 1
            self._waiting.pop(here, None)
            here = here.before


def _prefix(block: _Block) -> np.ndarray[Any, np.dtype[np.int32]]:
    """All tokens from the start of the prompt to the end of a live block."""
    parts = []
    here: _Block | None = block
    while here is not None:
        assert here.tokens is not None
        parts.append(here.tokens)
        here = here.before
    return np.frombuffer(b"".join(parts[::-1]), np.int32)


@lru_cache(64)
def _only(medium: str) -> frozenset[str]:
    """One object for all blocks that are in this medium alone."""
    return frozenset((medium,))


def _namespace(block: _Block) -> str:
    return adapter_namespace(block.adapter, block.salt)
