// How the content of a block is cut into pieces, and how an arena of the pool stores them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kvpool/base/page_format.h"

namespace kvpool {

struct Layout {
  std::uint32_t block_tokens = 16;
  std::vector<std::size_t> piece_bytes;  // canonical order: layer-major, K before V
  bool aggregated = true;                // one segment with all pieces of a block, or one segment a piece
  PageFormat format = {};                // what a piece is made of; unknown for raw bytes

  std::size_t block_bytes() const noexcept {
    return std::accumulate(piece_bytes.begin(), piece_bytes.end(), std::size_t{0});
  }
  std::vector<std::size_t> segment_bytes() const {
    return aggregated ? std::vector<std::size_t>{block_bytes()} : piece_bytes;
  }
};

}  // namespace kvpool
