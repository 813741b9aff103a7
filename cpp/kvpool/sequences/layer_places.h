// Where K and V of one layer lie in every block of a pool: what turns addresses into pointers for attention.
//
// Immutable after construction; keeps the arenas. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/blocks/layout.h"

namespace kvpool {

class LayerPlaces {
 public:
  // Throws kUnsupported when K or V of the layer is cut into several runs of bytes, as adopted tensors may have it.
  // REQUIRES: the format is known, layer < the number of layers, and no arena with blocks is on a GPU or absent.
  LayerPlaces(const Layout& layout, MediumMap<std::shared_ptr<Arena>> arenas, std::uint32_t layer);

  // Writes a pointer for each address: to the piece with K, and to that with V. Where K and V are fused it is the same
  // piece. REQUIRES: the addresses name blocks of the pool.
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
  static Run run_of(const Arena& arena, std::uint64_t offset, std::uint64_t bytes, std::uint32_t layer);

  MediumMap<std::shared_ptr<Arena>> arenas_;
  MediumMap<Place> places_;
};

}  // namespace kvpool
