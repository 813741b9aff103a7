"""What a pool tells of itself: its blocks, what it has done, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

__all__ = ["ArenaInfo", "MediumStats", "PoolStats", "stats_of"]


@dataclass(frozen=True)
class MediumStats:
    """The blocks of one medium.

    `free + active + historical + reserved + lent + quarantined + retired == capacity`, always.

    Attributes:
        capacity: Blocks there are.
        free: Nobody's.
        active: A caller's.
        historical: The index's: cached prompts.
        reserved: Promised to a transfer or a swap that is under way.
        lent: Another instance's.
        quarantined: Free but for a writer that is not known to be gone.
        retired: Their generations are used up.
        pinned: Of the historical ones, those that somebody holds or that are being moved.
        evictable: Of the historical ones, the others.
        free_runs: Maximal runs of free blocks.
        longest_free_run: Blocks in the longest of them.
    """

    capacity: int
    free: int
    active: int
    historical: int
    reserved: int
    lent: int
    quarantined: int
    retired: int
    pinned: int
    evictable: int
    free_runs: int
    longest_free_run: int


@dataclass(frozen=True)
class PoolStats:
    """The state of a pool, and what it has done since it was made.

    Attributes:
        hbm: Blocks of the device tier.
        dram: Blocks of the host tier.
        allocated_blocks: Given to callers.
        freed_blocks: Given back by callers.
        match_calls: Calls of match.
        requested_tokens: Tokens that matches asked for.
        matched_tokens: Tokens that matches found.
        inserted_blocks: Blocks newly stored in the index.
        duplicate_blocks: Blocks given to insert whose page was cached before.
        evicted_blocks: Cached blocks that were dropped to make room, or by evict.
        swapped_out_blocks: Cached blocks moved from HBM to DRAM.
        swapped_in_blocks: Cached blocks moved from DRAM to HBM.
        index_nodes: Nodes of the index.
        index_blocks: Blocks in the index.
        index_bytes: Memory of the index.
        namespaces: Namespaces with cached prompts, and the default one.
        metadata_bytes: Memory of the allocator.
        device_bytes: Memory of the GPU that the pool has taken: its blocks, rounded up to what the driver gives; 0 for
            adopted memory and without a GPU. With kernels also memory for the descriptions of long copies.
        kernel_piece_bytes: Mean length of pieces up to which kernels copy, and from which on the copy engines do: out
            of the pool's GPU, into it, and within it. Measured when the first pool on it is made; None when it was not.
    """

    hbm: MediumStats
    dram: MediumStats
    allocated_blocks: int
    freed_blocks: int
    match_calls: int
    requested_tokens: int
    matched_tokens: int
    inserted_blocks: int
    duplicate_blocks: int
    evicted_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    index_nodes: int
    index_blocks: int
    index_bytes: int
    namespaces: int
    metadata_bytes: int
    device_bytes: int
    kernel_piece_bytes: tuple[int, int, int] | None

    @property
    def hit_ratio(self) -> float:
        """Tokens found of tokens asked for; 0.0 before the first match."""
        return self.matched_tokens / self.requested_tokens if self.requested_tokens else 0.0


@dataclass(frozen=True)
class ArenaInfo:
    """The memory of one medium.

    Attributes:
        payload_bytes: Blocks times bytes a block.
        mapped_bytes: Memory that is taken for them; 0 for adopted memory.
        huge_page_bytes: Of these, in huge pages.
        owned: The pool's own; otherwise adopted.
        pinned: Page-locked for CUDA.
        device: Where it is: "cpu", or "cuda:0" and so on.
    """

    payload_bytes: int
    mapped_bytes: int
    huge_page_bytes: int
    owned: bool
    pinned: bool
    device: str


def stats_of(raw: dict[str, Any], kernel_piece_bytes: tuple[int, int, int] | None) -> PoolStats:
    """Of what the core has counted, and measured of the pool's GPU."""
    fields = dict(raw)
    hbm = MediumStats(**cast("dict[str, int]", fields.pop("hbm")))
    dram = MediumStats(**cast("dict[str, int]", fields.pop("dram")))
    return PoolStats(hbm=hbm, dram=dram, kernel_piece_bytes=kernel_piece_bytes, **fields)
