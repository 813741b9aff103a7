"""The latest batches, for subscribers that have missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

__all__ = ["ReplayBuffer"]


class ReplayBuffer:
    """The latest batches, with consecutive sequence numbers. Not thread-safe.

    Args:
        first: The number of the first batch.
        bytes_max: The most bytes of all payloads together; the newest batch is kept regardless of its size.
        batches_max: The most batches.
    """

    def __init__(self, first: int, bytes_max: int, batches_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches_max = batches_max
        self._bytes = 0
        self._payloads: deque[bytes] = deque()
        self.next = first

    def append(self, payload: bytes) -> int:
        """Keeps a batch, and drops the oldest to make room. Returns its number."""
        number = self.next
        self.next += 1
        self._payloads.append(payload)
        self._bytes += len(payload)
        while len(self._payloads) > 1 and (self._bytes > self._bytes_max or len(self._payloads) > self._batches_max):
            self._bytes -= len(self._payloads.popleft())
        return number

    def covers(self, start: int) -> bool:
        """Whether every batch from this number on is here; also true for the next number."""
        return self.next - len(self._payloads) <= start <= self.next

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """The batches from this number on. REQUIRES: covers(start), and no append meanwhile."""
        oldest = self.next - len(self._payloads)
        return enumerate(islice(self._payloads, start - oldest, None), start)
