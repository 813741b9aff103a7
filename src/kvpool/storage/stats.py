"""What `Storage` counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvpool.storage.store import StoreStats

__all__ = ["Counters", "StorageStats"]


@dataclass
class StorageStats:
    """What a `Storage` has done since it was made.

    Attributes:
        loads: Calls of load.
        loads_late: Of them, those that their budget ended: what came later was dropped.
        asked_blocks: Blocks that loads have looked for in the store.
        loaded_blocks: Blocks that loads have brought into the pool.
        loaded_bytes: Their content.
        late_blocks: Blocks that came, or were still to come, after their load's budget.
        skipped_loads: Loads that did not ask the store, because reading is switched off.
        saves: Calls of save, and batches of the policy.
        saved_blocks: Blocks newly written.
        saved_bytes: Their content.
        present_blocks: Blocks that were in the store already.
        gone_blocks: Blocks that had left the pool when their turn came, or had no content for too long.
        dropped_blocks: Blocks that were not saved: too many were waiting, or writing is switched off or has failed.
        lost_events: Events of the pool that came faster than they were read.
        read_errors: Calls of the store that failed while loading.
        write_errors: Calls of the store that failed while saving.
        policy_errors: Calls of the admission policy that failed: what they were about is not saved.
        reading_off: Whether loads leave the store alone for a while, because reading kept failing or being late.
        writing_off: Whether saves do, because writing kept failing.
        store: What the store itself counts.
    """

    loads: int = 0
    loads_late: int = 0
    asked_blocks: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    late_blocks: int = 0
    skipped_loads: int = 0
    saves: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    present_blocks: int = 0
    gone_blocks: int = 0
    dropped_blocks: int = 0
    lost_events: int = 0
    read_errors: int = 0
    write_errors: int = 0
    policy_errors: int = 0
    reading_off: bool = False
    writing_off: bool = False
    store: StoreStats = field(default_factory=StoreStats)


class Counters:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._stats = StorageStats()
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Adds to the fields of these names."""
        with self._lock:
            for name, more in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + more)

    def read(self, *, reading_off: bool, writing_off: bool, store: StoreStats) -> StorageStats:
        """A copy, with what others know."""
        with self._lock:
            counts = {name: value for name, value in vars(self._stats).items() if type(value) is int}
        return StorageStats(**counts, reading_off=reading_off, writing_off=writing_off, store=store)
