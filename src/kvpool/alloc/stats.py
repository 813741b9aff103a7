"""The statistics of a pool: its blocks, what it has done, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from kvpool import _core
from kvpool.alloc.disk import DiskStats, disk_stats_of

__all__ = ["ArenaInfo", "MediumStats", "NcclCost", "PoolStats", "stats_of", "tiers_text"]


@dataclass(frozen=True)
class MediumStats:
    """The blocks of one medium.

    `free + active + historical + reserved + lent + quarantined + retired + overlapped + suspended == capacity`, always.

    Attributes:
        capacity: All blocks.
        free: Free blocks.
        active: Blocks that the caller owns.
        historical: Blocks that the index owns: cached prompts.
        reserved: Blocks reserved for a transfer or a swap in progress.
        lent: Blocks lent to another instance.
        quarantined: Blocks that become free once a lost peer is proved to write no more.
        retired: Blocks whose generations are used up.
        overlapped: Blocks that find no run of units, since blocks of other models of a space lie there; 0 for a pool by
            itself.
        suspended: Blocks of HBM that the engine has taken back for a while: all but the retired ones, or none.
        pinned: Historical blocks that a match or insertion holds, or that are being moved.
        evictable: All other historical blocks.
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
    overlapped: int
    suspended: int
    pinned: int
    evictable: int
    free_runs: int
    longest_free_run: int


@dataclass(frozen=True)
class NcclCost:
    """What NCCL takes of a GPU's memory in this process, for all its pools together.

    Attributes:
        communicators: Two for each peer that was sent to and has sent.
        library_bytes: By how much the GPU's free memory fell while these were made and first used. This is about what
            NCCL has taken: what others allocate or free meanwhile counts, too.
        staging_bytes: Buffers of kvpool's passes (setting ``nccl_pass_bytes``), in use or kept for the next one.
    """

    communicators: int
    library_bytes: int
    staging_bytes: int


@dataclass(frozen=True)
class PoolStats:
    """The state of a pool, and its counters since it was created.

    Attributes:
        hbm: Blocks of the device tier.
        dram: Blocks of the host tier.
        disk: Blocks on disk; None for a pool without.
        allocated_blocks: Blocks allocated by callers.
        freed_blocks: Blocks freed by callers.
        failed_allocations: Calls of alloc, of blocks of this pool, that raised OutOfBlocks.
        match_calls: Calls of match.
        requested_tokens: Tokens that matches asked for.
        matched_tokens: Tokens that matches found.
        matched_dram_tokens: Of these, the tokens in DRAM blocks; the others were in HBM, or on DISK.
        inserted_blocks: Blocks newly stored in the index.
        duplicate_blocks: Blocks given to insert whose page was cached before.
        evicted_blocks: Cached blocks that were dropped to make room, or by evict.
        swapped_out_blocks: Cached blocks moved from HBM to DRAM.
        swapped_in_blocks: Cached blocks moved from DRAM to HBM.
        index_nodes: Nodes of the index.
        index_blocks: Blocks in the index.
        index_bytes: Memory of the index.
        namespaces: Namespaces with cached prompts, and the default one.
        metadata_bytes: Memory of the allocator, with 2 bytes a block for the counters of its readers, which take
            memory only once a block is read. Of a model of a space, without what all of its models share.
        device_bytes: GPU memory that the pool has allocated: its blocks, rounded up to the driver's granularity; 0 for
            adopted memory and without a GPU. With kernels also memory for the descriptions of long copies.
        kernel_piece_bytes: Up to this mean length of pieces kernels copy, above it the copy engines: out of the pool's
            GPU, into it, and within it. Measured when the first pool on the GPU is created; None if not measured.
        nccl: What the route "nccl" takes of the pool's GPU; None without a GPU.
    """

    hbm: MediumStats
    dram: MediumStats
    disk: DiskStats | None
    allocated_blocks: int
    freed_blocks: int
    failed_allocations: int
    match_calls: int
    requested_tokens: int
    matched_tokens: int
    matched_dram_tokens: int
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
    nccl: NcclCost | None

    @property
    def hit_ratio(self) -> float:
        """Tokens found of tokens asked for; 0.0 before the first match."""
        return self.matched_tokens / self.requested_tokens if self.requested_tokens else 0.0


@dataclass(frozen=True)
class ArenaInfo:
    """The memory of one medium.

    Attributes:
        payload_bytes: Number of blocks times bytes of a block; of a model of a space, all units of the space.
        mapped_bytes: Memory mapped for them; 0 for adopted memory.
        huge_page_bytes: The part of it in huge pages.
        owned: Whether the pool owns it; otherwise it is adopted.
        pinned: Whether it is page-locked for CUDA.
        device: The device of the memory: "cpu", or "cuda:0" and so on.
    """

    payload_bytes: int
    mapped_bytes: int
    huge_page_bytes: int
    owned: bool
    pinned: bool
    device: str


def stats_of(raw: dict[str, Any], gpu: int, store: dict[str, Any] | None) -> PoolStats:
    """Makes PoolStats from the core's counters, and of what is known of the pool's GPU; -1: none.

    `store`: what the store on disk says; None without one.
    """
    fields = dict(raw)
    hbm = MediumStats(**cast("dict[str, int]", fields.pop("hbm")))
    dram = MediumStats(**cast("dict[str, int]", fields.pop("dram")))
    disk = disk_stats_of(fields.pop("disk"), store)
    nccl = NcclCost(*_core.nccl_cost(gpu)) if gpu >= 0 else None
    return PoolStats(
        hbm=hbm, dram=dram, disk=disk, kernel_piece_bytes=_core.kernel_piece_bytes(gpu), nccl=nccl, **fields
    )


def tiers_text(stats: PoolStats) -> str:
    """One line of how many blocks of each medium are in use."""
    tiers = [
        f"{name} {tier.active} active, {tier.historical} cached, {tier.free} free of {tier.capacity}"
        for name, tier in (("HBM", stats.hbm), ("DRAM", stats.dram))
    ]
    if (disk := stats.disk) is not None:
        tiers.append(f"DISK {disk.used} used, {disk.free} free of {disk.capacity}, {disk.state}")
    return "; ".join(tiers)
