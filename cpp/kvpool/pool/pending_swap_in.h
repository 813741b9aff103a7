// Blocks on their way from DRAM to HBM, and their old blocks in limbo.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/prompt_index.h"

namespace kvpool {

// The state of a swap_in, from the check of its arguments to its end. Its pins keep the pages meanwhile: whatever else
// happens in the pool, each page is where it was; or another swap_in was faster, and the old block is in limbo with a
// mark that names the page's new block.
struct PendingSwapIn {
  std::vector<Address> addresses;  // of all pages, where they lie; at the end, in HBM
  std::vector<Address> from;       // those in DRAM, in this order: whole nodes
  std::vector<Address> to;         // blocks reserved for them; empty at first
  bool into_named = false;         // `to` are the caller's blocks, which it gets back when the swap fails
  std::vector<IndexPin> pins;      // until the end
  std::vector<IndexPin> held;      // room for the caller's pins
};

// Blocks that earlier pins may still read, after swap_in has given their page a new address. The mark of such a block
// is the number of the HBM block where the page lies now: the same pins keep it there.
struct Limbo {
  PromptNode* node;
  std::uint64_t stamp;      // pins taken before this may read the blocks
  std::uint32_t remaining;  // how many such pins are left
  std::vector<Address> blocks;
};

}  // namespace kvpool
