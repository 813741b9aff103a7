"""How often the beginnings of prompts have been asked for lately.

Counted are prefixes of a few lengths, each four times the one before, and only those that an instance holds; and that
of the length that is held most often, because there a prefix ends that many prompts share.
A prefix goes by its length and its last block, which is short to read; two different ones that end alike count as one.
Counts are of the last one to two windows of requests, so memory is bounded and nothing has to be searched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from kvpool.policy.routing.tokens import Tokens

__all__ = ["Uses"]

_LENGTHS: Final = [1 << power for power in range(0, 24, 2)]  # in blocks


class Uses:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._now: dict[tuple[int, str, bytes], int] = {}
        self._before: dict[tuple[int, str, bytes], int] = {}
        self._requests_now = 0
        self._requests_before = 0
        self._held: dict[int, int] = {}  # how often an instance held so many blocks at most, in the window
        self._often = 0  # the most frequent of them, where a prefix that many share may end

    @property
    def requests(self) -> int:
        """How many requests the counts are of."""
        return self._requests_now + self._requests_before

    def note(self, tokens: Tokens, held: int, block_tokens: int, namespace: str, window: int) -> list[tuple[int, int]]:
        """Counts one more request.

        Args:
            tokens: Its prompt.
            held: Tokens of it that an instance holds, whole blocks.
            block_tokens: Tokens a block.
            namespace: The prompt's.
            window: Requests after which counting begins anew; the counts before are kept until it does so again.

        Returns:
            Some lengths of it in tokens, rising, and how many requests have begun with as much, this one included. The
            last length is `held`; nothing if that is 0.
        """
        if self._requests_now >= window:
            self._before, self._now = self._now, {}
            self._requests_before, self._requests_now = self._requests_now, 0
            self._held = {self._often: 1}
        self._requests_now += 1
        blocks = held // block_tokens
        if blocks == 0:
            return []
        now, before = self._now.get, self._before.get
        counts, counted = self._now, []
        text, size = tokens[:held].tobytes(), block_tokens * tokens.itemsize
        times = self._held[blocks] = self._held.get(blocks, 0) + 1
        if times > self._held.get(self._often, 0):
            self._often = blocks
        lengths = [*_LENGTHS[: bisect_left(_LENGTHS, blocks)], blocks]
        if self._often < blocks and self._often not in lengths and self._often:
            insort(lengths, self._often)
        for length in lengths:
            end = length * size
            key = length, namespace, text[end - size : end]
            counts[key] = uses = now(key, 0) + 1
            counted.append((length * block_tokens, uses + before(key, 0)))
        return counted
