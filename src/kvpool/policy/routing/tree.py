"""The global prompt tree of one kind of instance (MemServe §6).

A tree learns in two ways, and each instance in its own:

  - From the KV events of the instance's pool. The tree applies every event, so its entries last until an event removes
    them.
  - From responses that pass the router. The router does not learn of evictions, so the tree forgets blocks that the
    instance has not used for `ttl_s`, or an eighth of it longer.

A lookup does not count as a use, because only one of the holders will serve the prompt, and the others may have evicted
it long ago. Sending the prompt to an instance counts as a use there.

The tree forgets old blocks by itself, when it is asked or learns. It looks at all of its blocks then, at most eight
times in `ttl_s`, and not while all that it has was learnt from events: at each about nine times after its last use,
which is little beside learning it.

However it learns, a tree has at most `blocks_max` blocks: beyond them it forgets the least recently matched or learnt
ones of any instance, ends of prompts first. If it forgets blocks of an instance that reports by events, it learns them
again only when the instance stores them again.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
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
_LOOKS: Final = 8  # for blocks to forget, in the time to live
_NEVER: Final = 1 << 63
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
        self._look_at = _NEVER  # when blocks may be too old; _NEVER while it has nothing that gets old
        self._learnt_at = 0  # what gets old, the last time
        self._expiry_lock = Lock()  # of both, for those that write them
        self._index = InstanceIndex(block_tokens, blocks_max)

    def __len__(self) -> int:
        """Blocks in the tree, however many instances hold each."""
        return len(self._index)

    @property
    def evicted(self) -> int:
        """Blocks that the tree has forgotten because it had more than `blocks_max`."""
        return self._index.evicted

    def match(self, tokens: TokenVector, namespace: str = "") -> tuple[Ints, Ints]:
        """The instances that hold the first block of a prompt, and how many tokens of it each holds: longest first."""
        self._expire_if_due(self._now())
        return self._index.match_arrays(tokens, None, namespace)

    def find(self, tokens: TokenVector, namespace: str = "") -> InstanceHits:
        """As match; the answer says how much one instance holds, and which instances hold a given length."""
        self._expire_if_due(self._now())
        return self._index.find(tokens, namespace)

    def insert(self, tokens: TokenVector, instance: int, namespace: str = "") -> int:
        """Notes for `ttl_s` that the instance holds the prompt, or soon will. Returns how many blocks are new."""
        now = self._now()
        if self._ttl is not None:
            with self._expiry_lock:
                self._learnt_at = max(self._learnt_at, now)
                if self._look_at == _NEVER:
                    self._look_at = now + self._ttl
        self._expire_if_due(now)
        return self._index.insert(tokens, instance, now, namespace)

    def apply(self, instance: int, event: StoredEvent | RemovedEvent | MovedEvent) -> None:
        """Applies an event of the instance's pool."""
        self._index.apply(instance, event, self._now(), lasting=True)

    def remove(self, tokens: TokenVector, instance: int, first_block: int = 0, namespace: str = "") -> int:
        """Notes that the instance does not hold the prompt from a block on. Returns how many blocks that removed."""
        return self._index.remove(tokens, instance, first_block, namespace)

    def forget(self, instance: int) -> int:
        """Forgets an instance that is gone or whose events have a gap. Returns how many blocks it held."""
        return self._index.remove_instance(instance)

    def expire(self) -> int:
        """Forgets what is older than `ttl_s`, now. The tree does so by itself.

        A caller that does it while it has nothing else to do spares a request the look at every block.

        Returns:
            Blocks that were forgotten, each counted once for every instance that held it.
        """
        return 0 if self._ttl is None else self._expire(self._now(), self._ttl)

    def blocks(self, instance: int) -> int:
        """Blocks that the instance holds."""
        return self._index.blocks(instance)

    def audit(self) -> None:
        """Checks the invariants of the index; raises AuditError when one is broken."""
        self._index.audit()

    def _expire_if_due(self, now: int) -> None:
        if now >= self._look_at and self._ttl is not None:
            self._expire(now, self._ttl)

    def _expire(self, now: int, ttl: int) -> int:
        with self._expiry_lock:  # before the look: another thread need not look as well
            if self._look_at != _NEVER:
                self._look_at = now + max(1, ttl // _LOOKS) if self._learnt_at >= now - ttl else _NEVER
        return self._index.expire(max(0, now - ttl))

    def _now(self) -> int:
        return max(0, int(self._clock() * _SECOND))
