// The 16 bytes that a store keeps for each block.
//
//   word   releases 24 | filling 1 | state 7     all zeros: free, never released
//   mark   32 bits, tag 64 bits      the owner's while the block is not free
//
// While blocks are free, the first and the last of each run are its boundary tags and belong to the free set:
//
//            head        interior    tail                 (a run of one block: head and tail are the same block)
//   mark     length      0           length
//   tag      links       0           0
//
// So reading the metadata of a block's neighbour finds the run that ends before it or begins after it. Blocks in the
// interior are not touched, and zeroed memory describes free blocks, so unused metadata costs no pages.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "kvpool/base/address.h"

namespace kvpool {

enum class BlockState : std::uint8_t {
  kFree = 0,
  kActive,       // owned by the local caller
  kHistorical,   // owned by the index; content immutable
  kReserved,     // promised to one transfer of one peer
  kLent,         // owned by a borrower
  kQuarantined,  // not freed yet, because a writer is not known to be gone
  kRetired,      // its generations are used up
  kSuspended,    // its memory is the engine's for a while
};
inline constexpr int kBlockStateCount = 8;
const char* block_state_name(BlockState state) noexcept;
// Whether the block has an owner.
inline constexpr bool is_owned(BlockState state) noexcept {
  return state != BlockState::kFree && state != BlockState::kRetired && state != BlockState::kSuspended;
}

struct alignas(16) BlockMeta {
  static constexpr int kStateBits = 8;
  static constexpr std::uint32_t kFilling = 1U << (kStateBits - 1);
  static constexpr std::uint32_t kStateMask = kFilling - 1;
  static constexpr std::uint32_t kOneRelease = 1U << kStateBits;
  std::uint32_t word;
  std::uint32_t mark;
  std::uint64_t tag;

  BlockState state() const noexcept { return static_cast<BlockState>(word & kStateMask); }
  bool is_free() const noexcept { return state() == BlockState::kFree; }
  void set_state(BlockState to) noexcept { word = (word & ~kStateMask) | static_cast<std::uint32_t>(to); }
  // Whether the content of a historical block is still to come.
  bool filling() const noexcept { return (word & kFilling) != 0; }
  void set_filling(bool filling) noexcept { word = filling ? word | kFilling : word & ~kFilling; }
  std::uint32_t releases() const noexcept { return word >> kStateBits; }
  // Sets the word and clears mark and tag with one store of 16 bytes: three stores would dominate the cost of release.
  void overwrite(std::uint32_t new_word) noexcept {
    typedef std::uint32_t Whole __attribute__((vector_size(16), may_alias));
    *reinterpret_cast<Whole*>(this) = Whole{new_word, 0, 0, 0};
  }
};
static_assert(sizeof(BlockMeta) == 16, "B4: 16 bytes of metadata a block");

struct FreeMemory {
  void operator()(BlockMeta* memory) const noexcept { std::free(memory); }
};
using MetaArray = std::unique_ptr<BlockMeta[], FreeMemory>;

// Zeroed metadata of so many free blocks, in pages that the kernel has not touched. Throws kOutOfMemory. REQUIRES:
// blocks <= kBlocksMax.
MetaArray make_meta(std::uint32_t blocks);

}  // namespace kvpool
