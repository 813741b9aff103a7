"""From the events of a pool to those that vLLM's subscribers know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.index import MovedEvent, RemovedEvent, StoredEvent
from kvpool.observe.events.block_hash import BlockHasher, short
from kvpool.observe.events.wire import BlockHash, BlockRemoved, BlockStored, WireEvent
from kvpool.types import Medium, media

__all__ = ["Hashes", "Translator"]

Event: TypeAlias = StoredEvent | RemovedEvent | MovedEvent
Hashes: TypeAlias = Literal["int", "bytes"]

# As vLLM calls its cache, and what it offloads to. A name for every medium: a cached block may be another instance's.
_NAMES: Final = {int(Medium.HBM): "GPU", int(Medium.DRAM): "CPU", int(Medium.DISK): "DISK"}
_BATCH_TOKENS: Final = 16_384  # so that a batch has some 100 KiB, and what waits for a slow reader can be reckoned


class Translator:
    """Makes batches of wire events of the events of one pool. Not thread-safe.

    Args:
        block_tokens: Tokens a block.
        hashes: "int": 64 bits of a block's digest; "bytes": all 256.
    """

    def __init__(self, block_tokens: int, hashes: Hashes = "int") -> None:
        self._block_tokens = block_tokens
        self._short = hashes == "int"
        self._hasher = BlockHasher(block_tokens)

    def batches(self, events: Iterable[Event]) -> Iterator[list[WireEvent]]:
        """The events in order, in lists of bounded size. A move stands in one list, so that no reader stops within."""
        batch: list[WireEvent] = []
        weight = 0
        for event in events:
            for piece, blocks in self._pieces(event):
                if batch and weight + blocks > self._blocks_max:
                    yield batch
                    batch, weight = [], 0
                batch += piece
                weight += blocks
        if batch:
            yield batch

    @property
    def _blocks_max(self) -> int:
        return max(1, _BATCH_TOKENS // self._block_tokens)

    def _pieces(self, event: Event) -> Iterator[tuple[list[WireEvent], int]]:
        """The event cut where its medium changes, and where it would be too long; each piece with its blocks."""
        names = self._names(event)
        before = _media_of(event.old_addrs) if isinstance(event, MovedEvent) else None
        after = _media_of(event.addrs)
        for begin, end in self._runs(after if before is None else list(zip(before, after, strict=True))):
            first = event.first_block + begin
            held = names[first : event.first_block + end]
            piece: list[WireEvent] = []
            if isinstance(event, RemovedEvent):
                piece.append(BlockRemoved(held, after[begin]))
            elif before is None:
                piece.append(self._stored(event, names, first, held, after[begin]))
            elif before[begin] != after[begin]:
                # The removal first: a reader that knows no media ends with what is true, that the blocks are there.
                piece.append(BlockRemoved(held, before[begin]))
                piece.append(self._stored(event, names, first, held, after[begin]))
            if piece:
                yield piece, end - begin

    def _names(self, event: Event) -> Sequence[BlockHash]:
        digests = self._hasher.chain(event.tokens, event.namespace)
        return [short(digest) for digest in digests] if self._short else digests

    def _stored(
        self, event: Event, names: Sequence[BlockHash], first: int, held: Sequence[BlockHash], medium: str
    ) -> BlockStored:
        size = self._block_tokens
        return BlockStored(
            block_hashes=held,
            parent_block_hash=names[first - 1] if first else None,
            token_ids=event.tokens[first * size : (first + len(held)) * size],
            block_size=size,
            medium=medium,
            extra_keys=[[event.namespace]] * len(held) if event.namespace else None,
        )

    def _runs(self, kinds: Sequence[object]) -> Iterator[tuple[int, int]]:
        """The maximal runs of equal kinds, of at most this many blocks."""
        begin = 0
        for _, group in groupby(kinds):
            end = begin + sum(1 for _ in group)
            for start in range(begin, end, self._blocks_max):
                yield start, min(end, start + self._blocks_max)
            begin = end


def _media_of(addrs: npt.NDArray[np.uint64]) -> list[str]:
    return [_NAMES[kind] for kind in media(addrs).tolist()]
