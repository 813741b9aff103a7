// Destinations of a fetch for which a CUDA stream waits.
//
// The kernels after the wait run and use these blocks even if the fetch fails, and only the caller knows when they have
// ended. So the handle of a failed fetch holds its destinations, and so does the receiver while the peer may still
// write them. The last holder gives them back to the pool.
//
// Thread-safety: all of it. In a forked child nothing is given back.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kvpool/transfer/block_host.h"

namespace kvpool {

class HeldBlocks {
 public:
  // `host` outlives it.
  HeldBlocks(BlockHost& host, std::vector<Address> addresses);
  ~HeldBlocks();
  HeldBlocks(const HeldBlocks&) = delete;
  HeldBlocks& operator=(const HeldBlocks&) = delete;

  // From now on the last holder gives the blocks back. REQUIRES: they are quarantined, or are about to be.
  void take_over() noexcept { owns_.store(true); }
  // The host is about to end: the blocks are no longer given back.
  void disown() noexcept { owns_.store(false); }

 private:
  BlockHost& host_;
  const std::vector<Address> addresses_;
  const std::uint32_t generation_;  // of forks
  std::atomic<bool> owns_{false};
};

}  // namespace kvpool
