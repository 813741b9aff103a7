"""The global prompt tree of one kind of instance (MemServe §6).

A tree learns in two ways, and each instance in its own:

  - From the KV events of the instance's pool. The tree applies every event, so its entries last until an event removes
    them.
  - From responses that pass the router, and from what is sent where. The router does not learn of evictions, so what
    an instance has not used for `ttl_s` counts as forgotten: no answer has it.

A lookup does not count as a use, because only one of the holders will serve the prompt, and the others may have evicted
it long ago. Sending the prompt to an instance counts as a use there.

Memory of what is too old is given back by and by: whenever the tree learns something from a response or a dispatch, it
looks at the 16 nodes (prompts, or parts that prompts share) that were longest unused, and at as many as were used since
the sweep over all of them began, but at most 64 of these at a time. So no call looks at all nodes. While requests come
at an even rate, the tree has at most a third more nodes than were used in `ttl_s`: each adds at most two. When the rate
falls, what came before leaves by 16 nodes a request: a sweep over n nodes takes n / 16 requests, and what grows too old
behind it waits for the next one. `expire` gives back the rest.

However it learns, a tree has at most `blocks_max` blocks: beyond them it forgets the least recently matched or learnt
ones of any instance, ends of prompts first. If it forgets blocks of an instance that reports by events, it learns them
again only when the instance stores them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.index import InstanceHits, InstanceIndex, MovedEvent, RemovedEvent, StoredEvent
from kvpool.types import TokenVector

__all__ = ["BLOCKS_MAX", "Ints", "PromptTree"]

Ints = npt.NDArray[np.int64]

BLOCKS_MAX: Final = 1 << 24  # with blocks of 16 tokens these take 1 GiB, and holders more

_SECOND = 1_000_000_000  # the index counts in whole numbers
_LOOKS: Final = 16  # for nodes to forget, whenever the tree learns
_FOREVER_S: Final = 1e9


class PromptTree:
    """Which instances hold which prefixes. Thread-safe.

    Args:
        block_tokens: Tokens a block; that of the instances.
        clock: Seconds, from any start; never before it.
        ttl_s: How long the tree keeps a prefix that it did not learn from events; None, and 1e9 or more: forever.
        blocks_max: Blocks in the tree at most; None for no bound. `kvpool.InstanceIndex` says what they take.
    """

    def __init__(
        self,
        block_tokens: int,
        clock: Callable[[], float],
        ttl_s: float | None = 300.0,
        blocks_max: int | None = BLOCKS_MAX,
    ) -> None:
        if ttl_s is not None and not ttl_s > 0:
            raise ArgumentError(f"ttl_s is {ttl_s}; it must be above 0, or None")
        self.block_tokens = block_tokens
        self.ttl_s = ttl_s
        self._clock = clock
        self._ttl = None if ttl_s is None or ttl_s >= _FOREVER_S else int(ttl_s * _SECOND)
        self._index = InstanceIndex(block_tokens, blocks_max)

    def __len__(self) -> int:
        """Blocks in the tree, however many instances hold each; those that are too old until they are given back."""
        return len(self._index)

    @property
    def evicted(self) -> int:
        """Blocks that the tree has forgotten because it had more than `blocks_max`."""
        return self._index.evicted

    def match(self, tokens: TokenVector, namespace: str = "") -> tuple[Ints, Ints]:
        """The instances that hold the first block of a prompt, and how many tokens of it each holds: longest first."""
        found = self.find(tokens, namespace)
        lengths, bounds = found.lengths, found.bounds
        return found.instances(0, len(found)), np.repeat(np.array(lengths, np.int64), np.diff(bounds))

    def find(self, tokens: TokenVector, namespace: str = "") -> InstanceHits:
        """As match; the answer says how much one instance holds, and which instances hold a given length."""
        return self._index.find(tokens, namespace, since=self._since(self._now()))

    def insert(self, tokens: TokenVector, instance: int, namespace: str = "") -> int:
        """Notes for `ttl_s` that the instance holds the prompt, or soon will. Returns how many blocks are new."""
        now = self._now()
        since = self._since(now)
        added = self._index.insert(tokens, instance, now, namespace, since=since)
        if since:
            self._index.expire(since, _LOOKS)
        return added

    def apply(self, instance: int, event: StoredEvent | RemovedEvent | MovedEvent) -> None:
        """Applies an event of the instance's pool."""
        self._index.apply(instance, event, self._now(), lasting=True)

    def remove(self, tokens: TokenVector, instance: int, first_block: int = 0, namespace: str = "") -> int:
        """Notes that the instance does not hold the prompt from a block on. Returns how many blocks that removed."""
        return self._index.remove(tokens, instance, first_block, namespace)

    def forget(self, instance: int) -> int:
        """Forgets an instance that is gone or whose events have a gap. Returns how many blocks it held."""
        return self._index.remove_instance(instance)

    def expire(self, nodes: int | None = None) -> int:
        """Gives back memory of what is older than `ttl_s`.

        Args:
            nodes: How many to look at, and at most four times as many that were used meanwhile: 100,000 take 32 ms.
                None: all.

        Returns:
            Blocks that were forgotten, each counted once for every instance that held it.
        """
        since = self._since(self._now())
        return self._index.expire(since, nodes) if since else 0

    def blocks(self, instance: int) -> int:
        """Blocks that the instance holds; those that are too old until they are given back."""
        return self._index.blocks(instance)

    def audit(self) -> None:
        """Checks the invariants of the index; raises AuditError when one is broken."""
        self._index.audit()

    def _since(self, now: int) -> int:
        """What was used at this time or later is not too old; 0 while nothing can be."""
        return 0 if self._ttl is None else max(0, now - self._ttl)

    def _now(self) -> int:
        return max(0, int(self._clock() * _SECOND))
