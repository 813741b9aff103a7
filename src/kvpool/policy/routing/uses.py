"""How often the beginnings of prompts have been asked for lately.

Counted are prefixes of a few lengths, each four times the one before, and only those that an instance holds; and that
of the length that is held most often in the namespace, because there a prefix ends that many prompts share.
A prefix goes by its length and its last block, which is short to read; two different ones that end alike count as one.
Counts are of the last one to two windows of requests, so memory is bounded and nothing has to be searched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

import numpy as np

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
        # By namespace: how often an instance held so many blocks at most, in the window; and the most frequent of these
        # numbers, where a prefix that many share may end.
        self._held: dict[str, dict[int, int]] = {}
        self._often: dict[str, int] = {}

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
            self._often = {name: self._often[name] for name in self._held}  # those that the window had
            self._held = {}
        self._requests_now += 1
        blocks = held // block_tokens
        if blocks == 0:
            return []
        lengths = [*_LENGTHS[: bisect_left(_LENGTHS, blocks)], blocks]
        often = self._note_held(namespace, blocks)
        if often < blocks and often not in lengths:
            insort(lengths, often)
        now, before = self._now.get, self._before.get
        counts, counted = self._now, []
        for length in lengths:
            end = length * block_tokens
            last = tokens[end - block_tokens : end].astype(np.int32, copy=False)  # one key, however it was passed
            key = length, namespace, last.tobytes()
            counts[key] = uses = now(key, 0) + 1
            counted.append((end, uses + before(key, 0)))
        return counted

    def _note_held(self, namespace: str, blocks: int) -> int:
        """An instance held so many. Returns how many are held most often, in this namespace."""
        often = self._often.get(namespace, 0)
        held = self._held.get(namespace)
        if held is None:
            held = self._held[namespace] = {often: 1} if often else {}
        times = held[blocks] = held.get(blocks, 0) + 1
        if times > held.get(often, 0):
            often = self._often[namespace] = blocks
        return often
