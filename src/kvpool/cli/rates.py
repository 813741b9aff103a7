"""How fast counters of members rise, from what they publish."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.cluster import Member

__all__ = ["Rates"]

_WINDOW_S: Final = 5.0  # members publish once a heartbeat, which is about a second


class Rates:
    """The tokens that matches asked for in a second, by member, over the last five seconds.

    Args:
        clock: Seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[int, int], deque[tuple[float, int]]] = {}

    def note(self, members: Sequence[Member]) -> None:
        """Notes what members publish now; those that are gone are forgotten."""
        now = self._clock()
        kept: dict[tuple[int, int], deque[tuple[float, int]]] = {}
        for member in members:
            samples = self._seen.get(_key(member), deque())
            samples.append((now, member.load.requested_tokens))
            while len(samples) > 2 and samples[1][0] <= now - _WINDOW_S:
                samples.popleft()
            kept[_key(member)] = samples
        self._seen = kept

    def of(self, member: Member) -> float | None:
        """Tokens a second; None if it was seen only once."""
        samples = self._seen.get(_key(member), deque())
        if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
            return None
        (began, first), (ended, last) = samples[0], samples[-1]
        return (last - first) / (ended - began)


def _key(member: Member) -> tuple[int, int]:
    return member.incarnation, member.term
