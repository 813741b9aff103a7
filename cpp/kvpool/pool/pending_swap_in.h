// Blocks on their way from DRAM to HBM, and what is left of them where they were.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/prompt_index.h"

namespace kvpool {

// What swap_in brings, from the checks of its arguments to the end. Its pins keep the pages meanwhile: whatever else is
// done to the pool, each is where it was, or, when another swap_in has brought it first, in limbo with a mark that says
// where it lies now.
struct PendingSwapIn {
  std::vector<Address> addresses;  // all of them, where they lie; once it has ended, in HBM
  std::vector<Address> from;       // those in DRAM, in this order: whole nodes
  std::vector<Address> to;         // reserved for them, once they are
  bool into_named = false;         // the caller's blocks, which it gets back when the swap fails
  std::vector<IndexPin> pins;      // until the end
  std::vector<IndexPin> held;      // room for the caller's pins
};

// The blocks that pins of an earlier time may still read, after swap_in gave their page a new address. The mark of such
// a block is the HBM block where the page lies now: the same pins keep it there.
struct Limbo {
  PromptNode* node;
  std::uint64_t stamp;      // pins taken before this may read the blocks
  std::uint32_t remaining;  // so many of them
  std::vector<Address> blocks;
};

}  // namespace kvpool
