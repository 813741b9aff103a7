"""The requests of a simulated cluster: prompts as ids of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["NO_IDS", "FreshIds", "Ids", "SimRequest", "Workload"]

Ids = npt.NDArray[np.int32]

NO_IDS: Final[Ids] = np.zeros(0, dtype=np.int32)
_END: Final = 2**31 - 1


@dataclass(slots=True)
class SimRequest:
    """A prompt and the length of its answer.

    An id stands for the content of one block of the prompt and for everything before it. Two prompts share a prefix as
    far as their ids agree, block by block.

    Attributes:
        time_s: When it is sent, seconds since the start.
        ids: int32, one for each block of the prompt, the last of which may be partial. Read-only.
        prompt: Tokens of it, 1 or more.
        output: Tokens that are generated, 1 or more.
        session: The session that it belongs to; None for a single request.
        output_ids: Blocks that the answer fills behind those of the prompt, if a later prompt can name them.
        then: The session's next requests, each sent after the answer to the one before; its `time_s` counts from that
            moment. Recorded arrivals have none.
    """

    time_s: float
    ids: Ids
    prompt: int
    output: int
    session: str | None = None
    output_ids: Ids = field(default_factory=lambda: NO_IDS)
    then: Iterator[SimRequest] | None = None


@dataclass(frozen=True)
class Workload:
    """Requests that can be iterated over repeatedly.

    Attributes:
        name: For a person.
        block_tokens: Tokens for which an id stands.
        start: Returns a new iterator over the requests, in the order of their times; the same each time.
        notes: Remarks for a person.
    """

    name: str
    block_tokens: int
    start: Callable[[], Iterator[SimRequest]]
    notes: tuple[str, ...] = ()


class FreshIds:
    """New ids, for content that is never repeated.

    After 2^31 they begin again at `first`: by then the first ones have long been evicted.

    Args:
        first: The least.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = self._next = first

    def take(self, blocks: int) -> Ids:
        """New ids for this many blocks."""
        if self._next > _END - blocks:
            self._next = self._first
        start = self._next
        self._next = start + blocks
        return np.arange(start, start + blocks, dtype=np.int32)
