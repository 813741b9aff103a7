"""What arrives at a simulated cluster: prompts as ids of blocks."""

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
    """A prompt and how long its answer gets.

    An id stands for the content of one block of the prompt and for everything before it. Two prompts share a prefix as
    far as their ids agree, block by block.

    Attributes:
        time_s: When it is sent, seconds since the start.
        ids: int32, one for each block of the prompt, the last of which may be partial. Read-only.
        prompt: Tokens of it, 1 or more.
        output: Tokens that are generated, 1 or more.
        session: Whose it is; None where nobody else's are.
        output_ids: Blocks that the answer fills behind those of the prompt, where a later prompt can name them.
        then: What the session sends when it has the answer; a `time_s` there counts from that moment. Sessions whose
            turns wait for each other have it, recorded arrivals do not.
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
    """Requests that can be gone through again and again.

    Attributes:
        name: For a person.
        block_tokens: Tokens for which an id stands.
        start: A new run through the requests, in the order of their times; the same each time.
        notes: What a person should know about it.
    """

    name: str
    block_tokens: int
    start: Callable[[], Iterator[SimRequest]]
    notes: tuple[str, ...] = ()


class FreshIds:
    """Ids that nobody has had, for content that is never repeated.

    After 2^31 of them they begin again behind `first`: what had them has long been evicted by then.

    Args:
        first: The least.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = self._next = first

    def take(self, blocks: int) -> Ids:
        """Ids for so many blocks."""
        if self._next > _END - blocks:
            self._next = self._first
        start = self._next
        self._next = start + blocks
        return np.arange(start, start + blocks, dtype=np.int32)
