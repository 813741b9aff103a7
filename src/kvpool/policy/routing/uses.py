"""How often the beginnings of prompts have been asked for lately.

Counted are prefixes of a few lengths, each four times the one before, and only those that an instance holds; and that
of the length that is held most often in the namespace, because there a prefix ends that many prompts share.
A prefix goes by its length and its last block, which is short to read; two different ones that end alike count as one.
Counts are of the last one to two windows of requests, so memory is bounded and nothing has to be searched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, Final, cast

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
        self._looked_up: tuple[str, int, list[tuple[int, str, bytes]]] = "", 0, []  # what `note` counts

    @property
    def requests(self) -> int:
        """How many requests the counts are of."""
        return self._requests_now + self._requests_before

    def look_up(
        self, tokens: Tokens, held: int, block_tokens: int, namespace: str, again: bool = False
    ) -> list[tuple[int, int]]:
        """How often prompts have begun as this one does; counts nothing.

        Args:
            tokens: A request's prompt.
            held: Tokens of it that an instance holds, whole blocks.
            block_tokens: Tokens a block.
            namespace: The prompt's.
            again: This request has been counted before.

        Returns:
            Some lengths of it in tokens, rising, and how many requests have begun with as much, this one included. The
            last length is `held`; nothing if that is 0.
        """
        blocks = held // block_tokens
        keys: list[tuple[int, str, bytes]] = []
        self._looked_up = namespace, blocks, keys
        if blocks == 0:
            return []
        lengths = [*_LENGTHS[: bisect_left(_LENGTHS, blocks)], blocks]
        often = self._often_with(namespace, blocks)
        if often < blocks and often not in lengths:
            insort(lengths, often)
        # One key, however it was passed. A memoryview cuts and copies in a quarter of the time that an array takes.
        whole = memoryview(cast(Any, tokens if tokens.itemsize == 4 else tokens[:held].astype(np.int32)))
        now, before, this = self._now.get, self._before.get, 0 if again else 1
        counted = []
        for length in lengths:
            end = length * block_tokens
            key = length, namespace, whole[end - block_tokens : end].tobytes()
            keys.append(key)
            counted.append((end, now(key, 0) + before(key, 0) + this))
        return counted

    def note(self, window: int) -> None:
        """Counts the request of the last `look_up`.

        Args:
            window: Requests after which counting begins anew; the counts before are kept until it does so again.
        """
        self._requests_now += 1
        namespace, blocks, keys = self._looked_up
        if blocks:
            self._note_held(namespace, blocks)
            counts = self._now
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
        if self._requests_now >= window:
            self._before, self._now = self._now, {}
            self._requests_before, self._requests_now = self._requests_now, 0
            self._often = {name: self._often[name] for name in self._held}  # those that the window had
            self._held = {}

    def _note_held(self, namespace: str, blocks: int) -> None:
        """An instance holds so many once more."""
        often = self._often_with(namespace, blocks)
        held = self._held.get(namespace)
        if held is None:
            before = self._often.get(namespace, 0)
            held = self._held[namespace] = {before: 1} if before else {}
        held[blocks] = held.get(blocks, 0) + 1
        self._often[namespace] = often

    def _often_with(self, namespace: str, blocks: int) -> int:
        """How many blocks are held most often in this namespace, if an instance holds so many once more."""
        often = self._often.get(namespace, 0)
        held = self._held.get(namespace)
        if held is None:
            held = {often: 1} if often else {}
        return blocks if held.get(blocks, 0) + 1 > held.get(often, 0) else often
