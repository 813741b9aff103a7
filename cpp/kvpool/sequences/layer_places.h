// Where K and V of one layer lie in every block of a pool: what turns addresses into pointers for attention.
//
// Immutable after construction; does not keep the memory. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/base/segment.h"
#include "kvpool/blocks/layout.h"

namespace kvpool {

// The segments of each medium that has blocks here, in this process's memory or on its GPU; none of the others.
using MediaSegments = MediumMap<std::span<const Segment>>;
MediaSegments segments_of(const MediumMap<std::shared_ptr<Arena>>& arenas) noexcept;
MediaSegments segments_of(const MediaSpans& spans) noexcept;

class LayerPlaces {
 public:
  // Throws kUnsupported when K or V of the layer is cut into several runs of bytes, as adopted tensors may have it.
  // REQUIRES: the format is known, layer < the number of layers.
  LayerPlaces(const Layout& layout, const MediaSegments& segments, std::uint32_t layer);

  // Writes a pointer for each address: to the piece with K, and to that with V. Where K and V are fused it is the same
  // piece. Null for a block of a medium without segments. REQUIRES: the addresses name blocks of the pool.
  void fill(std::span<const Address> addresses, const std::byte** k_blocks, const std::byte** v_blocks) const noexcept;

 private:
  struct Run {
    const std::byte* base = nullptr;  // in block 0
    std::size_t stride = 0;           // bytes from block to block
  };
  struct Place {
    Run k;
    Run v;
  };
  static Run run_of(std::span<const Segment> segments, std::uint64_t offset, std::uint64_t bytes, std::uint32_t layer);

  MediumMap<Place> places_;
};

}  // namespace kvpool
