// Where the pieces of blocks lie: piece s of block b is [base + b * stride, base + b * stride + bytes) of segment s.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/base/medium.h"

namespace kvpool {

struct Segment {
  std::byte* base;     // piece of block 0
  std::size_t stride;  // bytes from a block's piece to the next block's
  std::size_t bytes;   // length of the piece
};

// Where blocks lie that may be cut: each into so many runs of equal length, in the order of its content.
//
// Thread-safety: may be asked about a block by any thread, as long as nobody frees that block.
class BlockPlaces {
 public:
  virtual ~BlockPlaces() = default;
  virtual std::uint32_t pieces() const noexcept = 0;
  // The number of the place where a piece of the block begins. REQUIRES: the block has an owner; piece < pieces().
  virtual std::uint32_t unit_of(std::uint32_t block, std::uint32_t piece) const noexcept = 0;
};

// The blocks of one medium, as code that copies them sees them. The content of a block is the concatenation of its
// pieces in segment order. For memory of another process, `base` may be an address in that process: its maker says so.
struct MediumSpan {
  std::uint32_t blocks = 0;
  std::vector<Segment> segments;
  // If blocks may be cut. Then there is one segment, and a piece of a block lies where the segment has the block with
  // the number of that place.
  std::shared_ptr<const BlockPlaces> places = nullptr;

  std::size_t block_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const Segment& segment : segments) bytes += segment.bytes;
    return bytes;
  }
};

using MediaSpans = MediumMap<MediumSpan>;

}  // namespace kvpool
