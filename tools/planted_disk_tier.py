"""Bugs of blocks on disk, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp

__all__ = ["DISK_TIER_BUGS"]

_TESTS: Final = ("pool_disk_test.cpp",)
_END_TESTS: Final = ("pool_disk_end_test.cpp",)

DISK_TIER_BUGS: Final = (
    Bug(
        "disk-budget-of-some-writers",
        "pool",
        "what flush() writes is left out of the budget: a drive is written to faster than it may be",
        in_cpp(
            "pool/disk_tier.cpp",
            "  budget_.charge(n * store->slot_bytes(), now);\n",
            "  if (n == 1) budget_.charge(store->slot_bytes(), now);\n",
        ),
        _TESTS,
    ),
    Bug(
        "copy-left-behind-by-a-swap",
        "pool",
        "a page that moves to HBM leaves its copy on disk to the block's next owner, whose content is then lost (A19)",
        in_cpp("pool/cache_moves.cpp", "move_copy(from[i + k], pending.to[i + k]);", "static_cast<void>(k);"),
        _TESTS,
    ),
    Bug(
        "write-drops-what-it-writes",
        "pool",
        "room on disk is made with the beginning of a prompt whose end lies in memory, which is lost with it",
        in_cpp("pool/cache_disk_room.cpp", "if (node->children == nullptr) {", "if (node != nullptr) {"),
        _TESTS,
    ),
    Bug(
        "dropped-pages-stay-on-disk",
        "pool",
        "deleted prompts are there again after a restart",
        in_cpp("pool/disk_copies.h", "erased_.push_back({slot, generation});", "static_cast<void>(slot);"),
        _TESTS,
    ),
    Bug(
        "pinned-page-stays-on-disk",
        "pool",
        "a page on disk that is forgotten while it is pinned is there again after a restart",
        in_cpp("pool/cache_disk.cpp", "copies_->erase(block_of(page));", "static_cast<void>(page);"),
        _END_TESTS,
    ),
    Bug(
        "failed-erase-forgotten",
        "pool",
        "what could not be erased for want of memory is not tried again: no write to its slots ever succeeds",
        in_cpp("pool/disk_flush.cpp", "copies_.put_back(erased);", "static_cast<void>(erased);"),
        _END_TESTS,
    ),
    Bug(
        "flush-ignores-a-close",
        "pool",
        "a close waits for a flush of another thread",
        in_cpp("pool/disk_flush.cpp", "if (stopping_.load()) throw", "if (off_.load()) throw"),
        _END_TESTS,
    ),
    Bug(
        "damaged-block-is-served",
        "pool",
        "a block whose checksum is wrong is given out as good, with whatever was in memory",
        in_cpp("pool/disk_reads.cpp", "if (status == DiskStatus::kOk) continue;", "if (batch.size() > 0) continue;"),
        _TESTS,
    ),
)
