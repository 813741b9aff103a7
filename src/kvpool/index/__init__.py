"""The prompt index: which prefixes are cached, where, and how that changes."""

from kvpool._core import Inserted, InstanceHits, KeyedCache, KeyedIndex, KeyedMatch, Match
from kvpool.index.batch import IndexBatch
from kvpool.index.events import EventStream, MovedEvent, RemovedEvent, StoredEvent
from kvpool.index.report import MatchReport
from kvpool.index.trees import InstanceIndex, PromptIndex

__all__ = [
    "EventStream",
    "IndexBatch",
    "Inserted",
    "InstanceHits",
    "InstanceIndex",
    "KeyedCache",
    "KeyedIndex",
    "KeyedMatch",
    "Match",
    "MatchReport",
    "MovedEvent",
    "PromptIndex",
    "RemovedEvent",
    "StoredEvent",
]
