// Where the blocks of one cache and medium lie in the units of a space, when some of them lie in several pieces.
//
// A whole block lies in one run of units, from its number on. A scattered one has a list of as many places as a block
// has pieces, all of one size: piece i lies in `piece_units` units from units_of(block)[i] on. Its number is the least
// of them. Lists have a fixed room each. No two blocks begin in the same `piece_units` numbers, so that these have four
// bytes together, which say which list is the block's.
//
// Thread-safety: one thread at a time changes it; where a block lies may be read by others as long as it is not freed.
// Nothing allocates after construction, and rooms that are not used cost no memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>

#include "kvpool/base/segment.h"

namespace kvpool {

class BlockPieces final : public BlockPlaces {
 public:
  // For blocks with numbers below `numbers`, of which at most `blocks` are scattered at a time, in `pieces` pieces of
  // `piece_units` units. With one piece no block is ever scattered. Throws kOutOfMemory.
  BlockPieces(std::uint32_t numbers, std::uint32_t blocks, std::uint32_t pieces, std::uint32_t piece_units);

  std::uint32_t pieces() const noexcept override { return pieces_; }
  std::uint32_t piece_units() const noexcept { return piece_units_; }
  std::uint32_t scattered() const noexcept { return scattered_; }

  // REQUIRES, here and below: a block with this number has an owner or is retired.
  bool whole(std::uint32_t block) const noexcept { return pieces_ == 1 || list_of_[slot_of(block)] == 0; }
  // The first unit of a piece.
  std::uint32_t unit_of(std::uint32_t block, std::uint32_t piece) const noexcept override {
    return whole(block) ? block + piece * piece_units_ : units_of(block)[piece];
  }
  // Of all pieces. REQUIRES: the block is not whole.
  std::span<const std::uint32_t> units_of(std::uint32_t block) const noexcept;

  // The block lies in these pieces from now on. REQUIRES: as many as a block has; the block is their least, and is
  // whole; fewer than `blocks` are scattered.
  void scatter(std::uint32_t block, std::span<const std::uint32_t> units) noexcept;
  // The block is whole again, since it has been freed. REQUIRES: it is not whole.
  void forget(std::uint32_t block) noexcept;

  // Checks the lists: each belongs to one number that has units and is the least of its places, or is free. Throws
  // kAudit, std::bad_alloc; `name` names the medium. `has_units`: whether a block is not free.
  void audit(const char* name, const std::function<bool(std::uint32_t block)>& has_units) const;

  std::uint64_t metadata_bytes() const noexcept;

 private:
  struct FreeMemory {
    void operator()(std::uint32_t* memory) const noexcept { std::free(memory); }
  };
  using Words = std::unique_ptr<std::uint32_t[], FreeMemory>;

  // Of a block's number: it is divided by the size of a piece.
  std::uint32_t slot_of(std::uint32_t block) const noexcept {
    return (piece_units_ & (piece_units_ - 1)) == 0 ? block >> std::countr_zero(piece_units_) : block / piece_units_;
  }
  static Words zeros(std::size_t words);
  std::uint32_t* list(std::uint32_t number) const noexcept {
    return lists_.get() + static_cast<std::size_t>(number - 1) * pieces_;
  }

  const std::uint32_t numbers_;
  const std::uint32_t blocks_;
  const std::uint32_t pieces_;
  const std::uint32_t piece_units_;
  Words list_of_;  // of each block number by piece_units: 0 when whole, else the number of its list, from 1
  Words lists_;
  std::uint32_t lists_used_ = 0;  // numbers of lists up to this one were used at some time
  std::uint32_t free_list_ = 0;   // of those, one that is free; its first word is the next free one; 0: none
  std::uint32_t scattered_ = 0;
};

}  // namespace kvpool
