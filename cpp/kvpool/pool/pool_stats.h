// The counters of a pool.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvpool/base/medium.h"
#include "kvpool/blocks/block_store.h"

namespace kvpool {

struct PoolCounters {
  std::uint64_t allocated_blocks = 0;
  std::uint64_t freed_blocks = 0;
  std::uint64_t failed_allocations = 0;  // of the application, for want of blocks
  std::uint64_t match_calls = 0;
  std::uint64_t requested_tokens = 0;
  std::uint64_t matched_tokens = 0;
  std::uint64_t matched_dram_tokens = 0;  // of these, in DRAM
  std::uint64_t inserted_blocks = 0;
  std::uint64_t duplicate_blocks = 0;
  std::uint64_t evicted_blocks = 0;
  std::uint64_t swapped_out_blocks = 0;
  std::uint64_t swapped_in_blocks = 0;
  // Of a pool with a disk.
  std::uint64_t matched_disk_tokens = 0;
  std::uint64_t disk_written_blocks = 0;
  std::uint64_t moved_to_disk_blocks = 0;  // evicted, and found on DISK from then on
  std::uint64_t brought_blocks = 0;        // from DISK to DRAM
  std::uint64_t lost_disk_blocks = 0;      // whose entries were damaged or gone when they were read
};

struct MediumCounts {
  std::uint32_t capacity = 0;
  std::array<std::uint32_t, kBlockStateCount> by_state{};
  std::uint32_t evictable = 0;  // of the historical ones: neither pinned nor being moved
  std::uint32_t copies = 0;     // of the historical ones: copies on disk of pages that lie elsewhere
  std::uint32_t displaced = 0;  // of those without an owner: other caches of the space are in their way
  FreeRuns free_runs{};
};

struct PoolStats {
  MediumMap<MediumCounts> media;
  PoolCounters counters;
  std::size_t index_nodes = 0;
  std::size_t index_blocks = 0;
  std::size_t index_bytes = 0;
  std::size_t namespaces = 0;
  std::uint64_t metadata_bytes = 0;
  std::uint64_t device_bytes = 0;  // GPU memory that the pool has allocated
};

// How often HBM blocks have changed owners: blocks that were filled and given to the index, and blocks that were freed.
// Work of former owners on the GPU may still write or read them.
struct ReuseCounts {
  std::uint64_t filled = 0;
  std::uint64_t freed = 0;
};

}  // namespace kvpool
