"""What was published last, for subscribers that missed some of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

__all__ = ["ReplayBuffer"]


class ReplayBuffer:
    """The last batches, with their sequence numbers, which follow each other. Not thread-safe.

    Args:
        first: The number of the first batch.
        bytes_max: What all payloads together may have; the newest batch is kept whatever its size.
        batches_max: How many there may be.
    """

    def __init__(self, first: int, bytes_max: int, batches_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches_max = batches_max
        self._bytes = 0
        self._payloads: deque[bytes] = deque()
        self.next = first

    def append(self, payload: bytes) -> int:
        """Keeps a batch; its number. The oldest make room for it."""
        number = self.next
        self.next += 1
        self._payloads.append(payload)
        self._bytes += len(payload)
        while len(self._payloads) > 1 and (self._bytes > self._bytes_max or len(self._payloads) > self._batches_max):
            self._bytes -= len(self._payloads.popleft())
        return number

    def covers(self, start: int) -> bool:
        """Whether every batch from this number on is here. So it is, too, when the number is the next one."""
        return self.next - len(self._payloads) <= start <= self.next

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """The batches from this number on. REQUIRES: covers(start), and no append meanwhile."""
        oldest = self.next - len(self._payloads)
        return enumerate(islice(self._payloads, start - oldest, None), start)
