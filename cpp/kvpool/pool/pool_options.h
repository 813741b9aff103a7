// The options of a pool.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/arena/device_memory.h"
#include "kvpool/blocks/adopted_pages.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/blocks/parallel.h"
#include "kvpool/index/eviction_order.h"
#include "kvpool/pool/disk_admission.h"

namespace kvpool {

class DiskDirectory;

struct AdoptedMemory {
  std::uint32_t blocks = 0;
  std::vector<Segment> segments;
  std::shared_ptr<void> keepalive;
  int device = -1;                        // the GPU that it is on; -1: ordinary memory
  std::vector<TensorShape> tensors = {};  // whose memory the segments are; empty: only sizes are checked
};

// Blocks on disk: see disk_tier.h.
struct DiskTierOptions {
  std::uint32_t blocks = 0;  // at least 1
  std::string path;          // a directory
  // What the content of blocks depends on besides their size and tokens, as (name, value): layout, model, ...
  std::vector<std::pair<std::string, std::string>> format = {};
  DiskAdmission admission = DiskAdmission::kOnSecondUse;
  std::uint64_t bytes_s = 0;                           // written at most; 0: no limit
  std::uint64_t bytes_day = 0;                         // written at most; 0: no limit
  std::int64_t timeout_ns = 30'000'000'000;            // of a read that a caller waits for
  std::int64_t hang_ns = 10'000'000'000;               // I/O that takes longer switches the disk off
  std::shared_ptr<DiskDirectory> directory = nullptr;  // of tests; null: that of the path
};

struct PoolOptions {
  Layout layout;
  std::uint32_t hbm_blocks = 0;
  std::uint32_t dram_blocks = 0;
  std::optional<AdoptedMemory> adopted_hbm;
  // The engine's allocator decides about HBM; the pool mirrors it with adopt() and free(). For adopted memory, in this
  // process or in ranks.
  bool engine_allocates = false;
  int device = -1;  // the GPU that HBM is on; -1: ordinary memory. Ignored for adopted memory
  DeviceMemoryKind device_memory = DeviceMemoryKind::kAuto;
  EvictionPolicy policy = EvictionPolicy::kLru;
  int copy_threads = 2;
  HugePages huge_pages = HugePages::kAuto;
  int numa_node = -1;
  bool check_memory = true;
  bool pin_dram = false;               // required for a pool with both tiers whose HBM is on a GPU
  bool audit = false;                  // after every verb
  bool zero_on_alloc = false;          // fills allocated blocks with zeros
  std::int64_t lend_max = -1;          // blocks lent to all peers together; -1: no limit
  std::uint32_t first_generation = 0;  // of the blocks; 0: unlike other pools'. For tests that replay bit by bit
  // Set for the scheduler of a logical instance: it counts and indexes blocks whose memory is in ranks.
  std::optional<Sharding> sharding;
  std::optional<DiskTierOptions> disk;

  std::uint32_t blocks_in_hbm() const noexcept { return adopted_hbm ? adopted_hbm->blocks : hbm_blocks; }
  // The GPU that HBM is on; -1: none.
  int hbm_device() const noexcept { return adopted_hbm ? adopted_hbm->device : device; }
};

// Returns the options. Throws kArgument if they contradict each other.
const PoolOptions& checked(const PoolOptions& options);

}  // namespace kvpool
