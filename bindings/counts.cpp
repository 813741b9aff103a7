#include "counts.h"

#include "tensor.h"

namespace kvpool::bindings {
namespace {

py::dict to_dict(const MediumCounts& counts) {
  py::dict dict;
  dict["capacity"] = counts.capacity;
  for (int state = 0; state < kBlockStateCount; ++state) {
    dict[block_state_name(static_cast<BlockState>(state))] = counts.by_state[static_cast<std::size_t>(state)];
  }
  dict["overlapped"] = counts.displaced;
  dict["evictable"] = counts.evictable;
  dict["pinned"] =
      counts.by_state[static_cast<std::size_t>(BlockState::kHistorical)] - counts.evictable - counts.copies;
  dict["free_runs"] = counts.free_runs.runs;
  dict["longest_free_run"] = counts.free_runs.longest;
  return dict;
}

// Of the pool; Pool._disk_stats has what the store says.
py::dict disk_dict(const PoolStats& stats) {
  const MediumCounts& counts = stats.media[Medium::kDisk];
  const PoolCounters& counters = stats.counters;
  py::dict dict;
  dict["capacity"] = counts.capacity;
  dict["free"] = counts.by_state[static_cast<std::size_t>(BlockState::kFree)];
  dict["used"] = counts.by_state[static_cast<std::size_t>(BlockState::kHistorical)];
  dict["copies"] = counts.copies;
  dict["evictable"] = counts.evictable;
  dict["matched_tokens"] = counters.matched_disk_tokens;
  dict["written_blocks"] = counters.disk_written_blocks;
  dict["moved_blocks"] = counters.moved_to_disk_blocks;
  dict["brought_blocks"] = counters.brought_blocks;
  dict["lost_blocks"] = counters.lost_disk_blocks;
  return dict;
}

}  // namespace

py::dict to_dict(const PoolStats& stats) {
  py::dict dict;
  dict["hbm"] = to_dict(stats.media[Medium::kHbm]);
  dict["dram"] = to_dict(stats.media[Medium::kDram]);
  dict["disk"] = disk_dict(stats);
  const PoolCounters& counters = stats.counters;
  dict["allocated_blocks"] = counters.allocated_blocks;
  dict["freed_blocks"] = counters.freed_blocks;
  dict["failed_allocations"] = counters.failed_allocations;
  dict["match_calls"] = counters.match_calls;
  dict["requested_tokens"] = counters.requested_tokens;
  dict["matched_tokens"] = counters.matched_tokens;
  dict["matched_dram_tokens"] = counters.matched_dram_tokens;
  dict["inserted_blocks"] = counters.inserted_blocks;
  dict["duplicate_blocks"] = counters.duplicate_blocks;
  dict["evicted_blocks"] = counters.evicted_blocks;
  dict["swapped_out_blocks"] = counters.swapped_out_blocks;
  dict["swapped_in_blocks"] = counters.swapped_in_blocks;
  dict["index_nodes"] = stats.index_nodes;
  dict["index_blocks"] = stats.index_blocks;
  dict["index_bytes"] = stats.index_bytes;
  dict["namespaces"] = stats.namespaces;
  dict["metadata_bytes"] = stats.metadata_bytes;
  dict["device_bytes"] = stats.device_bytes;
  return dict;
}

py::dict to_dict(const Arena& arena) {
  py::dict dict;
  dict["payload_bytes"] = arena.payload_bytes();
  dict["mapped_bytes"] = arena.mapped_bytes();
  dict["huge_page_bytes"] = arena.huge_page_bytes();
  dict["owned"] = arena.owned();
  dict["pinned"] = arena.pinned();
  dict["device"] = device_name(arena);
  return dict;
}

}  // namespace kvpool::bindings
