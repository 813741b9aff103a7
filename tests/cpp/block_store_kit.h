// Helpers of the block store's tests.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "kvpool/blocks/block_store.h"

namespace kvpool::testing::block_store {

inline std::vector<Address> take_blocks(BlockStore& store, std::uint32_t n, BlockState to = BlockState::kActive) {
  std::vector<Address> out(n);
  REQUIRE(store.take(n, to, out.data()));
  return out;
}

inline std::uint32_t pieces_of(const std::vector<Address>& addresses) {
  std::uint32_t pieces = addresses.empty() ? 0 : 1;
  for (std::size_t i = 1; i < addresses.size(); ++i) {
    pieces += block_of(addresses[i]) == block_of(addresses[i - 1]) + 1 ? 0 : 1;
  }
  return pieces;
}

inline void release_blocks(BlockStore& store, const std::vector<Address>& addresses) {
  for (std::size_t i = 0; i < addresses.size();) {
    const std::uint32_t first = block_of(addresses[i]);
    std::uint32_t n = 1;
    while (i + n < addresses.size() && block_of(addresses[i + n]) == first + n) ++n;
    store.release(first, n);
    i += n;
  }
}

}  // namespace kvpool::testing::block_store
