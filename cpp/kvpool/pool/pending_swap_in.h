// Blocks on their way up, from DRAM to HBM or from DISK to DRAM, and old blocks in limbo.
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
  Medium source = Medium::kDram;   // DRAM, from where pages go to HBM; or DISK, from where they go to DRAM
  std::vector<Address> addresses;  // of all pages, where they lie
  std::vector<Address> from;       // those in the source, in this order: whole nodes
  std::vector<Address> to;         // blocks reserved for them; empty at first
  bool into_named = false;         // `to` are the caller's blocks, which it gets back when the swap fails
  std::vector<IndexPin> pins;      // until the end
  std::vector<IndexPin> held;      // room for the caller's pins
};

// Blocks that earlier pins may still read, after swap_in has given their page a new address. The mark of such a block
// names the block where the page lies now (mark_naming): the same pins keep it there.
struct Limbo {
  PromptNode* node;
  std::uint64_t stamp;      // pins taken before this may read the blocks
  std::uint32_t remaining;  // how many such pins are left
  std::vector<Address> blocks;
};

// A medium and a block number in a mark.
inline constexpr std::uint32_t mark_naming(Address address) noexcept {
  return medium_bits_of(address) << kBlockBits | block_of(address);
}
inline constexpr Medium medium_of_mark(std::uint32_t mark) noexcept { return static_cast<Medium>(mark >> kBlockBits); }
inline constexpr std::uint32_t block_of_mark(std::uint32_t mark) noexcept { return mark & (kBlocksMax - 1); }

}  // namespace kvpool
