"""The two indexes that can be used without a pool."""

from __future__ import annotations

from kvpool import _core
from kvpool.errors import ArgumentTypeError
from kvpool.index.batch import IndexBatch
from kvpool.index.events import EventStream, MovedEvent, RemovedEvent, StoredEvent
from kvpool.index.report import MatchReport

__all__ = ["InstanceIndex", "PromptIndex"]


class PromptIndex(_core.PromptIndex):
    """A radix tree from prompts to values, block by block: the index of a pool, usable alone.

    Values are opaque 64-bit numbers, one for each block. Thread-safe. The cost of a call grows with its prompt, not
    with the size of the index.

    Args:
        block_tokens: Tokens a block.
        policy: Which blocks `evict` drops first: "lru", "lfu" or "fifo"; always from the ends of prompts.
    """

    @property
    def batch(self) -> IndexBatch:
        """The batch forms of match and insert."""
        return IndexBatch(self)

    def explain_match(self, tokens: _core.TokenVector, namespace: str = "") -> MatchReport:
        """Explains what match would find, and why it ends there. Pins nothing and does not count as a use.

        Args:
            tokens: As in match.
            namespace: As in match.
        """
        return MatchReport.from_core(self.block_tokens, self._explain(tokens, namespace), opaque=True)

    def subscribe(self, capacity_tokens: int = 1 << 24, include_cached: bool = False) -> EventStream:
        """A stream of all changes from now on, as events that wait until they are drained.

        Args:
            capacity_tokens: When the waiting events have more tokens than this together, the oldest are lost.
            include_cached: Begin with a StoredEvent for everything that is cached now, regardless of the capacity: for
                a reader that starts, or starts again after it has lost events.
        """
        return EventStream(self._subscribe(capacity_tokens, include_cached))


class InstanceIndex(_core.InstanceIndex):
    """A router's tree: which instances hold which prefixes (MemServe §6, the global prompt tree).

    Fed by the event streams of pools (`apply`) or by the router's own decisions (`insert`). It may be out of date;
    `expire` forgets blocks that were not used for a time, all at once or by and by. Thread-safe.

    Args:
        block_tokens: Tokens a block; that of the instances.
        blocks_max: The most blocks, no matter how many instances hold each; an insertion that exceeds this makes it
            forget the least recently used. A block takes 4 bytes a token; a prompt, or a part that prompts share, takes
            200 bytes more, and 16 for each instance that holds it. None for no bound.
    """

    def apply(
        self, instance: int, event: StoredEvent | RemovedEvent | MovedEvent, now: int = 0, *, lasting: bool = False
    ) -> None:
        """Applies an event of a pool.

        Args:
            instance: The instance of the event.
            event: From the instance's EventStream.
            now: As in insert.
            lasting: As in insert: for a router that follows every event of the instance.
        """
        if isinstance(event, StoredEvent):
            self.insert(event.tokens, instance, now, event.namespace, lasting=lasting)
        elif isinstance(event, RemovedEvent):
            self.remove(event.tokens, instance, event.first_block, event.namespace)
        elif not isinstance(event, MovedEvent):  # a move changes nothing here: the instance still holds the blocks
            raise ArgumentTypeError(f"no event: {type(event).__name__}")
