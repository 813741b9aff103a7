"""Limits all requests of the router together, and their bytes. With only a limit for each, many could fill the memory.

Large bodies share a part of the bytes and wait for their turn, while the router does not read from their clients. The
rest is for small bodies, which never wait: they fit or are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from kvpool.control.router.errors import Refusal

__all__ = ["STREAM_BYTES", "Budget", "Share"]

STREAM_BYTES: Final = 1 << 20  # that a streamed body takes: its connections hold no more of it
_PAUSE_S: Final = 1
_LARGE_PART: Final = 3, 4  # of all bytes


class Budget:
    """Counts requests, and the bytes that they hold from their arrival on. Belongs to one event loop.

    Args:
        bytes_max: Of all requests together.
        requests_max: The most concurrent requests.

    Attributes:
        held: Bytes that are held now.
        requests: Current requests.
    """

    def __init__(self, bytes_max: int, requests_max: int) -> None:
        self._bytes_max = bytes_max
        self._large_max = self.for_large(bytes_max)
        self._requests_max = requests_max
        self._waiting: deque[tuple[int, anyio.Event]] = deque()
        self._held_large = 0
        self.held = 0
        self.requests = 0

    @staticmethod
    def for_large(bytes_max: int) -> int:
        """The part of this many bytes that large bodies may hold together."""
        part, of = _LARGE_PART
        return bytes_max * part // of

    @contextmanager
    def share(self) -> Iterator[Share]:
        """A request's share, given back at the end. Raises Refusal, 503, at the limit of requests."""
        if self.requests >= self._requests_max:
            raise Refusal(503, "too many requests are under way", "overloaded", retry_after_s=_PAUSE_S)
        share = Share(self)
        self.requests += 1
        try:
            yield share
        finally:
            self.requests -= 1
            share.give_back()

    # ---- for shares

    def _take(self, size: int) -> None:
        if self.held + size > self._bytes_max:
            raise _full()
        self.held += size

    async def _wait_for(self, size: int, timeout_s: float) -> None:
        """Takes bytes of the part for large bodies, first come, first served."""
        if not self._waiting and self._fits(size):
            self._take_large(size)
            return
        granted = anyio.Event()
        self._waiting.append((size, granted))
        try:
            with anyio.fail_after(timeout_s):
                await granted.wait()
        except BaseException as error:
            if granted.is_set():  # at the same moment
                self._give_back(0, size)
            else:
                self._waiting.remove((size, granted))
                self._grant()  # a smaller one may have waited behind it
            if isinstance(error, TimeoutError):
                raise _full() from error
            raise

    def _give_back(self, small: int, large: int) -> None:
        self.held -= small + large
        self._held_large -= large
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, granted = self._waiting.popleft()
            self._take_large(size)
            granted.set()

    def _take_large(self, size: int) -> None:
        self._held_large += size
        self.held += size

    def _fits(self, size: int) -> bool:
        return self._held_large + size <= self._large_max and self.held + size <= self._bytes_max


class Share:
    """One request's part of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._small = self._large = 0

    def take(self, size: int) -> None:
        """Takes more bytes. Raises Refusal, 503 with a time to retry, and takes none if too few are left."""
        self._budget._take(size)
        self._small += size

    async def wait_for(self, size: int, timeout_s: float) -> None:
        """Waits for bytes for a large body, and takes them. Raises Refusal, 503, at the timeout.

        REQUIRES: at most `Budget.for_large`.
        """
        await self._budget._wait_for(size, timeout_s)
        self._large += size

    def give_back(self) -> None:
        """Gives all of it back. Idempotent."""
        small, large, self._small, self._large = self._small, self._large, 0, 0
        self._budget._give_back(small, large)


def _full() -> Refusal:
    return Refusal(503, "too many bytes of requests are held", "overloaded", retry_after_s=_PAUSE_S)
