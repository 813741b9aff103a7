// What a space has to know of the prompts over a cache's blocks, in order to count quotas.
#pragma once

#include <cstdint>

#include "kvpool/base/medium.h"

namespace kvpool {

class CachedBlocks {
 public:
  // Blocks that hold cached content which nobody pins, those between which it is being moved among them. Called with
  // the space's lock held.
  virtual std::uint32_t unpinned_blocks(Medium medium) const noexcept = 0;

 protected:
  ~CachedBlocks() = default;
};

}  // namespace kvpool
