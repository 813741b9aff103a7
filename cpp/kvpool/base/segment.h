// Where the pieces of blocks lie: piece s of block b is [base + b * stride, base + b * stride + bytes) of segment s.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpool/base/medium.h"

namespace kvpool {

struct Segment {
  std::byte* base;     // piece of block 0
  std::size_t stride;  // bytes from a block's piece to the next block's
  std::size_t bytes;   // length of the piece
};

// The blocks of one medium, as code that copies them sees them. The content of a block is the concatenation of its
// pieces in segment order. For memory of another process, `base` may be an address in that process: its maker says so.
struct MediumSpan {
  std::uint32_t blocks = 0;
  std::vector<Segment> segments;

  std::size_t block_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const Segment& segment : segments) bytes += segment.bytes;
    return bytes;
  }
};

using MediaSpans = MediumMap<MediumSpan>;

}  // namespace kvpool
