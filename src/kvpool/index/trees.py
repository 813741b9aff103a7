"""The two indexes that can be used without a pool."""

from __future__ import annotations

from kvpool import _core
from kvpool.errors import ArgumentTypeError
from kvpool.index.events import EventStream, MovedEvent, RemovedEvent, StoredEvent
from kvpool.index.report import MatchReport

__all__ = ["InstanceIndex", "PromptIndex"]


class PromptIndex(_core.PromptIndex):
    """A radix tree from prompts to values, block by block: the index of a pool, usable alone.

    Values are opaque 64-bit numbers, one for each block. Thread-safe. Cost of a call grows with its prompt, not with
    what is stored.

    Args:
        block_tokens: Tokens a block.
        policy: Which blocks `evict` drops first: "lru", "lfu" or "fifo"; always from the ends of prompts.
    """

    def explain_match(self, tokens: _core.TokenVector, namespace: str = "") -> MatchReport:
        """Says what match would find, and why it ends there. Pins nothing and does not count as a use.

        Args:
            tokens: As in match.
            namespace: As in match.
        """
        return MatchReport.from_core(self.block_tokens, self._explain(tokens, namespace), opaque=True)

    def subscribe(self, capacity_tokens: int = 1 << 24, include_cached: bool = False) -> EventStream:
        """Everything that happens from now on, as events that wait until they are drained.

        Args:
            capacity_tokens: Events whose tokens exceed this together lose the oldest of them.
            include_cached: Begin with a StoredEvent for everything that is cached now, whatever the capacity: for a
                reader that starts, or starts again after it has lost events.
        """
        return EventStream(self._subscribe(capacity_tokens, include_cached))


class InstanceIndex(_core.InstanceIndex):
    """A router's tree: which instances hold which prefixes (MemServe §6, the global prompt tree).

    Fed by the event streams of pools (`apply`) or by the router's own decisions (`insert`). It is a picture, not a
    promise; `expire` forgets what was not used for a time. Thread-safe.

    Args:
        block_tokens: Tokens a block; that of the instances.
        blocks_max: Blocks that it has at most, however many instances hold each; an insertion that leaves more makes it
            forget the longest unused. A block takes 4 bytes a token; a prompt, or a part of one that others share,
            200 bytes beside that, and 16 for each instance that holds it. None for no bound.
    """

    def apply(
        self, instance: int, event: StoredEvent | RemovedEvent | MovedEvent, now: int = 0, *, lasting: bool = False
    ) -> None:
        """Takes over what a pool's event says.

        Args:
            instance: Whose event it is.
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
