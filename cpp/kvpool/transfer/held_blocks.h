// Destinations of a fetch that a stream waits for.
//
// Whatever becomes of the fetch, the kernels behind the wait run, and read and write these blocks. Nobody but the
// caller knows when they have ended. So blocks that a failed fetch gives back to the pool are held by its handle, and
// by the receiver as long as the peer may still write them: who lets go last gives them back.
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

  // REQUIRES: the blocks are quarantined, or are about to be, and nobody else gives them back.
  void take_over() noexcept { owns_.store(true); }
  // The host is about to go: they are given back no more.
  void disown() noexcept { owns_.store(false); }

 private:
  BlockHost& host_;
  const std::vector<Address> addresses_;
  const std::uint32_t generation_;  // of forks
  std::atomic<bool> owns_{false};
};

}  // namespace kvpool
