"""Changes of cached prompts, as a stream for a router or a monitor.

An event carries the whole prefix, so a reader can apply it without other data: `tokens` are all tokens from the
prompt's start to the end of the blocks that changed, and the blocks from `first_block` on changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool import _core

__all__ = ["Event", "EventStream", "MovedEvent", "RemovedEvent", "StoredEvent"]


@dataclass(frozen=True)
class StoredEvent:
    """Blocks of a prompt were stored.

    Attributes:
        sequence: Grows by one with each event of the pool or index.
        namespace: Of the prompt.
        tokens: int32, from the prompt's start to the end of the new blocks.
        first_block: The first new block; `len(addrs)` blocks are new.
        addrs: uint64, where they lie.
    """

    sequence: int
    namespace: str
    tokens: npt.NDArray[np.int32]
    first_block: int
    addrs: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RemovedEvent:
    """Blocks of a prompt were evicted or deleted; `addrs` is where they lay. Otherwise as `StoredEvent`."""

    sequence: int
    namespace: str
    tokens: npt.NDArray[np.int32]
    first_block: int
    addrs: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class MovedEvent:
    """Blocks of a prompt moved from `old_addrs` to `addrs`, in the same order. Otherwise as `StoredEvent`."""

    sequence: int
    namespace: str
    tokens: npt.NDArray[np.int32]
    first_block: int
    addrs: npt.NDArray[np.uint64]
    old_addrs: npt.NDArray[np.uint64]


Event: TypeAlias = StoredEvent | RemovedEvent | MovedEvent


class EventStream:
    """A subscription. Events wait in it until they are drained; when it is full the oldest are lost, and counted.

    Iterating drains the waiting events and ends; it does not wait for more. Thread-safe.

    Attributes:
        lost: Events that were lost so far. If it grows, a reader must drop its copy and subscribe again, with
            `include_cached=True`.
    """

    def __init__(self, source: _core.EventSource) -> None:
        """Use `Pool.subscribe` or `PromptIndex.subscribe`."""
        self._source = source
        self.lost = 0

    def drain(self) -> list[Event]:
        """Takes every event that has happened since the last call, in order.

        Raises:
            ClosedError: The stream, or its pool, is closed.
        """
        lost, raw = self._source.drain()
        self.lost += lost
        return [_event(*fields) for fields in raw]

    def __iter__(self) -> Iterator[Event]:
        """The events of one `drain()`."""
        return iter(self.drain())

    def close(self) -> None:
        """Ends the subscription. Idempotent."""
        self._source.close()

    def __enter__(self) -> EventStream:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()


def _event(
    kind: int,
    sequence: int,
    namespace: str,
    tokens: npt.NDArray[np.int32],
    first_block: int,
    addrs: npt.NDArray[np.uint64],
    old_addrs: npt.NDArray[np.uint64],
) -> Event:
    if kind == 0:
        return StoredEvent(sequence, namespace, tokens, first_block, addrs)
    if kind == 1:
        return RemovedEvent(sequence, namespace, tokens, first_block, addrs)
    return MovedEvent(sequence, namespace, tokens, first_block, addrs, old_addrs)
