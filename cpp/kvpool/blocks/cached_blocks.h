// What a space has to know of the prompts over a cache's blocks, in order to count quotas.
#pragma once

#include <cstdint>

#include "kvpool/base/medium.h"

namespace kvpool {

class CachedBlocks {
 public:
  // Historical blocks that can be evicted now. Called with the space's lock held, like the next one.
  virtual std::uint32_t evictable_blocks(Medium medium) const noexcept = 0;
  // Blocks between which cached content is being copied: those that it leaves, in HBM, and those that it goes to.
  virtual std::uint32_t moving_blocks(Medium medium) const noexcept = 0;

 protected:
  ~CachedBlocks() = default;
};

}  // namespace kvpool
