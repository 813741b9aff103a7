"""The blocks of a simulated instance: those of running requests, and cached ones in HBM and in DRAM.

The radix index (`kvpool.PromptIndex`) with its pins and its eviction is real; blocks are only counted:

    C1  blocks in the HBM index + private blocks <= hbm_blocks
    C2  blocks in either tier - blocks in the HBM index <= dram_blocks
    C3  when nothing runs nothing is private or pinned

Private blocks belong to running requests, and no other request can match them yet: prompts that are being computed, and
answers. A request gets the blocks of its final length when it begins, as if the engine knew it: so it is never
preempted.

HBM evicts to DRAM, and a hit in DRAM moves back to HBM: the most recently used blocks are in HBM, the next ones in
DRAM. So the second index covers both tiers together, and the first one says how much of a prefix is in HBM. While
blocks are swapped in they are in both tiers, as in a pool, and the blocks evicted for them need DRAM too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError, AuditError
from kvpool.index import EventStream, Inserted, Match, PromptIndex
from kvpool.sim.requests import Ids

__all__ = ["Held", "InstanceCache"]


class Held:
    """The blocks of a request in an instance. Attributes count blocks.

    Attributes:
        in_hbm: Of its prompt, in the HBM index and pinned.
        found: Of its prompt, found in HBM when it began.
        cached: Of its prompt, found in either tier.
        private: Blocks that no other request can match.
    """

    __slots__ = ("cached", "found", "in_hbm", "pins", "private")

    def __init__(self, in_hbm: int, cached: int, private: int, pins: list[Match | Inserted]) -> None:
        self.in_hbm = self.found = in_hbm
        self.cached, self.private, self.pins = cached, private, pins

    def unpin(self) -> None:
        """Unpins the blocks that it matched or inserted."""
        for pin in self.pins:
            pin.close()
        self.pins = []


class InstanceCache:
    """The blocks of one instance. Not thread-safe.

    Args:
        hbm_blocks: For running requests and for cached blocks.
        dram_blocks: For blocks that HBM evicts; 0 for none.
    """

    def __init__(self, hbm_blocks: int, dram_blocks: int = 0) -> None:
        if hbm_blocks < 1 or dram_blocks < 0:
            raise ArgumentError(f"{hbm_blocks} blocks of HBM, at least 1; {dram_blocks} of DRAM, at least 0")
        self.hbm_blocks, self.dram_blocks = hbm_blocks, dram_blocks
        self.private = 0
        self._hbm = PromptIndex(block_tokens=1)
        self._both = PromptIndex(block_tokens=1) if dram_blocks else self._hbm
        self._values: npt.NDArray[np.uint64] = np.zeros(1024, dtype=np.uint64)

    def subscribe(self) -> EventStream:
        """Subscribes to blocks becoming cached, and no longer cached, in either tier."""
        return self._both.subscribe()

    def peek(self, ids: Ids) -> int:
        """Blocks of a prompt that are cached in either tier; does not count as a use."""
        return self._both.peek(ids)

    def admit(self, ids: Ids, blocks: int) -> Held | None:
        """Pins the cached blocks of a prompt and reserves the others that it needs, evicting where necessary.

        Args:
            ids: The prompt.
            blocks: Blocks of prompt and answer together; at least as many as ids.

        Returns:
            None if running requests leave too few blocks; then only the order of eviction has changed.
        """
        match = self._hbm.match(ids)
        pins: list[Match | Inserted] = [match]
        in_hbm = cached = match.tokens
        if self.dram_blocks:
            both = self._both.match(ids)
            pins.append(both)
            cached = max(in_hbm, both.tokens)
        need = blocks - in_hbm
        over = self.private + len(self._hbm) + need - self.hbm_blocks
        held = Held(in_hbm, cached, need, pins)
        if over > 0:
            if over > self._hbm.stats()["evictable"]:
                held.unpin()
                return None
            self._hbm.evict(over)
        self.private += need
        if self.dram_blocks:
            self._trim()
        return held

    def store(self, held: Held, ids: Ids) -> None:
        """Stores a computed prompt, or a prompt and its answer: others can match it; the request keeps it pinned."""
        blocks = len(ids)
        if blocks > len(self._values):
            self._values = np.zeros(2 * blocks, dtype=np.uint64)
        values = self._values[:blocks]
        pins: list[Match | Inserted] = [self._hbm.insert(ids, values)]
        # Blocks that another request has stored meanwhile are its; ours are free again.
        given = min(held.private, blocks - held.in_hbm)
        held.private -= given
        self.private -= given
        held.in_hbm = blocks
        if self.dram_blocks:
            pins.append(self._both.insert(ids, values))
        held.unpin()
        held.pins = pins
        if self.dram_blocks:
            self._trim()

    def release(self, held: Held) -> None:
        """Ends a request here: frees its private blocks and unpins what it stored."""
        self.private -= held.private
        held.private = 0
        held.unpin()

    def audit(self, idle: bool = False) -> None:
        """Checks C1 and C2, and with `idle` C3. Raises AuditError."""
        self._hbm.audit()
        hbm = len(self._hbm) + self.private
        if hbm > self.hbm_blocks or self.private < 0:
            raise AuditError(f"C1: {len(self._hbm)} cached and {self.private} private of {self.hbm_blocks} blocks")
        if self.dram_blocks:
            self._both.audit()
            if len(self._both) - len(self._hbm) > self.dram_blocks:
                raise AuditError(
                    f"C2: {len(self._both)} cached, {len(self._hbm)} of them in HBM; DRAM has {self.dram_blocks} blocks"
                )
        if idle:
            pinned = [len(index) - index.stats()["evictable"] for index in (self._hbm, self._both)]
            if self.private or any(pinned):
                raise AuditError(f"C3: {self.private} private and {pinned} pinned blocks, but nothing runs")

    def _trim(self) -> None:
        """Evicts what neither tier has room for."""
        over = len(self._both) - len(self._hbm) - self.dram_blocks
        if over > 0:
            self._both.evict(over)
