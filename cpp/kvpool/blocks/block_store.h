// State, generation and ownership of every block of one medium, and the free set over them.
//
// Invariants
//   B1  Every block has exactly one state, and the counters add up to the capacity.
//   B2  A block's generation grows by one each time it is released. An address is valid while its generation equals
//       the block's. A block whose generation would wrap is retired instead of freed, and never comes back.
//   B3  The free set holds exactly the blocks in state kFree, as maximal runs: no two free runs touch. A store whose
//       numbers are units has none: the space knows which units are free (unit_set.h).
//   B4  16 bytes of metadata a number, and nothing else that grows with the capacity.
//
// Thread-safety: none; the pool holds its lock. No method allocates after construction.
#pragma once

#include <array>
#include <cstdint>

#include "kvpool/base/address.h"
#include "kvpool/base/check.h"
#include "kvpool/base/medium.h"
#include "kvpool/blocks/block_meta.h"
#include "kvpool/blocks/free_set.h"

namespace kvpool {

// Why an address names no block here.
enum class AddressFault : std::uint8_t {
  kNone,
  kForeign,     // of another instance
  kNoMedium,    // the medium bits name no medium, or that of another store
  kOutOfRange,  // no such block
  kStale,       // the block has been freed since
};

struct FreeRuns {
  std::uint32_t runs;     // maximal runs of free blocks
  std::uint32_t longest;  // length of the longest of them, in blocks
};

class BlockStore {
 public:
  // All blocks start free with the first of these generations, and are retired after the last. Stores with disjoint
  // generations refuse each other's addresses as stale. The metadata is zero pages until the blocks are used.
  // REQUIRES: blocks <= kBlocksMax; 0 < first <= last <= kGenerationMax. Throws Error(kOutOfMemory).
  BlockStore(Medium medium, std::uint32_t blocks, std::uint32_t first_generation = 1,
             std::uint32_t last_generation = kGenerationMax)
      : BlockStore(medium, blocks, blocks, true, first_generation, last_generation) {}
  // A store whose blocks have the numbers that place() is told, below `numbers`, and of which no more than `blocks`
  // have an owner or are retired at any time. Blocks without an owner have no number: they count as free. take(),
  // release() and suspend() are not for it. REQUIRES: blocks <= numbers <= kBlocksMax, and as above.
  struct Placed {
    std::uint32_t numbers;
  };
  BlockStore(Medium medium, std::uint32_t blocks, Placed placed, std::uint32_t first_generation,
             std::uint32_t last_generation)
      : BlockStore(medium, blocks, placed.numbers, false, first_generation, last_generation) {}
  ~BlockStore();
  BlockStore(const BlockStore&) = delete;
  BlockStore& operator=(const BlockStore&) = delete;

  Medium medium() const noexcept { return medium_; }
  std::uint32_t capacity() const noexcept { return capacity_; }
  // All block numbers are below.
  std::uint32_t numbers() const noexcept { return numbers_; }
  std::uint32_t count(BlockState state) const noexcept { return counts_[static_cast<std::size_t>(state)]; }
  std::uint32_t free_count() const noexcept { return count(BlockState::kFree); }

  // Addresses with this instance id or with 0 are accepted. The addresses that it makes keep instance 0 until
  // set_instance(), which also accepts the id. REQUIRES, of both: instance <= kInstanceMax.
  void accept_instance(std::uint32_t instance) noexcept;
  void set_instance(std::uint32_t instance) noexcept;
  std::uint32_t instance() const noexcept { return own_prefix_ >> kMediumBits; }
  std::uint32_t made_instance() const noexcept { return made_prefix_ >> kMediumBits; }  // of the addresses it makes

  // Takes n free blocks to state `to` and writes their addresses. Prefers one contiguous run of at least n, the
  // smallest that fits; without one, takes the longest runs first. Returns false and changes nothing when fewer than
  // n blocks are free. Addresses of one run are consecutive and ascending in `out`. REQUIRES: is_owned(to); `out`
  // has room for n.
  bool take(std::uint32_t n, BlockState to, Address* out) noexcept;

  // Takes exactly this free block (adopted memory, where an engine chooses). False if it is not free or out of range.
  bool take_block(std::uint32_t block, BlockState to, Address* out) noexcept;

  // Frees blocks [first, first + n): bumps generations, retires those that wrap, clears tag and mark, coalesces.
  // REQUIRES: each is owned, and none is being filled.
  void release(std::uint32_t first, std::uint32_t n) noexcept;
  // Takes blocks number first, first + step, ... to state `to`. REQUIRES: this is a store with numbers that it is told;
  // they are free; is_owned(to); `out` has room for n.
  void place(std::uint32_t first, std::uint32_t step, std::uint32_t n, BlockState to, Address* out) noexcept;
  // The block has no owner any more; or it is retired, then false. REQUIRES: as place(); it is owned, and not being
  // filled.
  bool unplace(std::uint32_t block) noexcept;
  // All free blocks become suspended, so they cannot be taken; and free again, with the same generations. REQUIRES, of
  // both: no block is owned.
  void suspend() noexcept;
  void resume() noexcept;
  // How many blocks have been freed, ever.
  std::uint64_t released() const noexcept { return released_; }

  // Whether the address names a block here now. kNone says only that the generation is current: the caller must check
  // the block's state, because a made-up address may name a free block.
  AddressFault find(Address address) const noexcept {
    const auto prefix = static_cast<std::uint32_t>(address >> kMediumShift);
    const std::uint32_t block = block_of(address);
    if ((prefix == own_prefix_ || prefix == local_prefix_) && block < numbers_ &&
        meta_[block].releases() + first_generation_ == generation_of(address)) [[likely]] {
      return AddressFault::kNone;
    }
    return fault_of(address);
  }

  // REQUIRES, here and below: block < numbers().
  BlockState state(std::uint32_t block) const noexcept { return meta(block).state(); }
  // One more than the last for a retired block.
  std::uint32_t generation(std::uint32_t block) const noexcept { return meta(block).releases() + first_generation_; }
  // The block's address now. For a retired block, an address with generation 0, which find() refuses.
  Address address_of(std::uint32_t block) const noexcept {
    return static_cast<Address>(made_prefix_) << kMediumShift |
           static_cast<Address>(generation(block) & kGenerationMax) << kGenerationShift | block;
  }

  // Moves a block from one owned state to another.
  void set_state(std::uint32_t block, BlockState to) noexcept {
    BlockMeta& block_meta = owned_meta(block);
    KVPOOL_DCHECK(is_owned(to) && (!block_meta.filling() || to == BlockState::kHistorical));
    --counts_[static_cast<std::size_t>(block_meta.state())];
    ++counts_[static_cast<std::size_t>(to)];
    block_meta.set_state(to);
  }

  // A word and a half-word for the owner of a block that is not free (the index keeps its node here, validation its
  // stamp against duplicates in one list). Zero after take(). REQUIRES: the block is not free: its metadata would be
  // the free set's.
  std::uint64_t tag(std::uint32_t block) const noexcept { return meta(block).tag; }
  void set_tag(std::uint32_t block, std::uint64_t tag) noexcept { owned_meta(block).tag = tag; }
  std::uint32_t mark(std::uint32_t block) const noexcept { return meta(block).mark; }
  void set_mark(std::uint32_t block, std::uint32_t mark) noexcept { owned_meta(block).mark = mark; }

  // Whether a historical block's content is still to come. REQUIRES: the block is owned; historical, to set it.
  bool filling(std::uint32_t block) const noexcept { return meta(block).filling(); }
  void set_filling(std::uint32_t block, bool filling) noexcept { owned_meta(block).set_filling(filling); }

  // For tests of B2: as if the block had been freed many times. REQUIRES: the block is free;
  // first generation <= generation <= last generation.
  void set_generation_for_test(std::uint32_t block, std::uint32_t generation) noexcept;

  // A generation above all that place() has given out.
  std::uint32_t generation_after() const noexcept { return first_generation_ + generations_given_; }

  FreeRuns free_runs() const noexcept;
  std::uint64_t metadata_bytes() const noexcept;

  // Walks all metadata and checks B1 to B3. Throws Error(kAudit) with what is wrong.
  void audit() const;

 private:
  BlockStore(Medium medium, std::uint32_t blocks, std::uint32_t numbers, bool has_free_set,
             std::uint32_t first_generation, std::uint32_t last_generation);

  const BlockMeta& meta(std::uint32_t block) const noexcept {
    KVPOOL_DCHECK(block < numbers_);
    return meta_[block];
  }
  BlockMeta& owned_meta(std::uint32_t block) noexcept {
    KVPOOL_DCHECK(block < numbers_ && is_owned(meta_[block].state()));
    return meta_[block];
  }
  // The releases of a block in its last generation. A retired block has one more, which no address can match.
  std::uint32_t releases_max() const noexcept { return last_generation_ - first_generation_; }
  AddressFault fault_of(Address address) const noexcept;
  // visit(first, n) for each maximal run of blocks in that state, which visit may change.
  template <class Visit>
  void for_each_run_in(BlockState state, Visit&& visit);
  void move_run(std::uint32_t first, std::uint32_t n, BlockState from, BlockState to) noexcept;
  // Blocks [first, first + n), which have left the free set, become `to`.
  void hand_out(std::uint32_t first, std::uint32_t n, BlockState to, Address* out) noexcept;

  MetaArray meta_;
  std::uint32_t capacity_;
  std::uint32_t numbers_;
  bool has_free_set_;
  std::uint32_t first_generation_;
  std::uint32_t last_generation_;
  std::uint32_t local_prefix_;  // instance and medium as an address has them, for instance 0
  std::uint32_t own_prefix_;    // the same, for the instance id that is accepted
  std::uint32_t made_prefix_;   // that of the addresses it makes: one of the two
  Medium medium_;
  std::array<std::uint32_t, kBlockStateCount> counts_{};
  std::uint64_t released_ = 0;
  std::uint32_t generations_given_ = 0;  // by place(), from the first one on
  FreeSet free_;
};

}  // namespace kvpool
