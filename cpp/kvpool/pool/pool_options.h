// What a pool is made of.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/arena/device_memory.h"
#include "kvpool/blocks/adopted_pages.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/blocks/parallel.h"
#include "kvpool/index/eviction_order.h"

namespace kvpool {

struct AdoptedMemory {
  std::uint32_t blocks = 0;
  std::vector<Segment> segments;
  std::shared_ptr<void> keepalive;
  int device = -1;                        // the GPU that it is on; -1: ordinary memory
  bool engine_allocates = false;          // the engine's allocator decides; the pool mirrors it with adopt() and free()
  std::vector<TensorShape> tensors = {};  // what the segments are of; empty: only sizes are checked
};

struct PoolOptions {
  Layout layout;
  std::uint32_t hbm_blocks = 0;
  std::uint32_t dram_blocks = 0;
  std::optional<AdoptedMemory> adopted_hbm;
  int device = -1;  // the GPU that HBM is on; -1: ordinary memory. Of adopted memory: its own counts
  DeviceMemoryKind device_memory = DeviceMemoryKind::kAuto;
  EvictionPolicy policy = EvictionPolicy::kLru;
  int copy_threads = 2;
  HugePages huge_pages = HugePages::kAuto;
  int numa_node = -1;
  bool check_memory = true;
  bool pin_dram = false;               // REQUIRED of a pool with both tiers whose HBM is on a GPU
  bool audit = false;                  // after every verb
  bool zero_on_alloc = false;          // blocks are handed out as zeros
  std::uint32_t first_generation = 0;  // of the blocks; 0: far from other pools'. For tests that replay bit by bit
  // The scheduler of a logical instance: its blocks are counted and indexed here, and have their memory in ranks.
  std::optional<Sharding> sharding;

  std::uint32_t blocks_in_hbm() const noexcept { return adopted_hbm ? adopted_hbm->blocks : hbm_blocks; }
  // The GPU that HBM is on; -1: none.
  int hbm_device() const noexcept { return adopted_hbm ? adopted_hbm->device : device; }
};

// Returns the options. Throws kArgument for those that contradict each other.
const PoolOptions& checked(const PoolOptions& options);

}  // namespace kvpool
