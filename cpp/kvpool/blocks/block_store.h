// State, generation and ownership of every block of one medium, and the free set over them.
//
// Invariants
//   B1  Every block has exactly one state, and the counters add up to the capacity.
//   B2  A block's generation grows by one each time it is released. An address is valid while its generation equals
//       the block's. A block whose generation would wrap is retired instead of freed, and never comes back.
//   B3  The free set holds exactly the blocks in state kFree, as maximal runs: no two free runs touch. A store whose
//       numbers are units has none: the space knows which units are free (unit_set.h).
//   B4  16 bytes of metadata a block, and nothing else that grows with the capacity. In a store whose numbers are
//   units,
//       20 bytes for each slot: so many numbers next to each other that no two blocks begin in them.
//
// Thread-safety: none; the pool holds its lock. No method allocates after construction.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>

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
      : BlockStore(medium, blocks, blocks, blocks, true, first_generation, last_generation) {}
  // A store whose blocks have the numbers that place() is told, below `numbers`, and of which no more than `blocks`
  // have an owner or are retired at any time; their numbers differ by `apart` at least. Blocks without an owner have no
  // number: they count as free. take(), release() and suspend() are not for it. REQUIRES: blocks <= numbers <=
  // kBlocksMax, no more blocks than slots of `apart` numbers, apart >= 1, and as above.
  struct Placed {
    std::uint32_t numbers;
    std::uint32_t apart = 1;
  };
  BlockStore(Medium medium, std::uint32_t blocks, Placed placed, std::uint32_t first_generation,
             std::uint32_t last_generation);
  ~BlockStore();
  BlockStore(const BlockStore&) = delete;
  BlockStore& operator=(const BlockStore&) = delete;

  Medium medium() const noexcept { return medium_; }
  std::uint32_t capacity() const noexcept { return capacity_; }
  // All block numbers are below.
  std::uint32_t numbers() const noexcept { return numbers_; }
  // Where what is counted by block has its place for this number; all are below slots(). A store with a free set has a
  // slot for each number.
  std::uint32_t slots() const noexcept { return slots_; }
  std::uint32_t slot_of(std::uint32_t block) const noexcept {
    return first_of_ == nullptr ? block : static_cast<std::uint32_t>(block * apart_inverse_ >> apart_shift_);
  }
  // The block that has this slot, or had it last. REQUIRES: slot < slots().
  std::uint32_t block_in(std::uint32_t slot) const noexcept { return first_of_ == nullptr ? slot : first_of_[slot]; }
  // Whether a block that is not free has the slot; whether this block is not free. A slot that no block ever had says
  // that block 0 was in it, which may have a slot elsewhere. REQUIRES: slot < slots(); block < numbers().
  bool slot_taken(std::uint32_t slot) const noexcept { return !meta_[slot].is_free(); }
  bool is_taken(std::uint32_t block) const noexcept {
    return slot_taken(slot_of(block)) && block_in(slot_of(block)) == block;
  }
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
  // they are free; `step` is a multiple of what they are apart; is_owned(to); `out` has room for n.
  void place(std::uint32_t first, std::uint32_t step, std::uint32_t n, BlockState to, Address* out) noexcept;
  // Blocks number first, first + step, ... have no owner any more, up to the first one that is retired instead. Returns
  // how many came before that, or n. REQUIRES: as place(); they are owned, and none is being filled; n > 0.
  std::uint32_t unplace(std::uint32_t first, std::uint32_t step, std::uint32_t n) noexcept;
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
        is_current(block, generation_of(address))) [[likely]] {
      return AddressFault::kNone;
    }
    return fault_of(address);
  }

  // Whether the address names a block here now that has this state, and is not being filled.
  bool names(Address address, BlockState state) const noexcept {
    const auto prefix = static_cast<std::uint32_t>(address >> kMediumShift);
    const std::uint32_t block = block_of(address);
    if ((prefix != own_prefix_ && prefix != local_prefix_) || block >= numbers_) return false;
    const std::uint32_t slot = slot_of(block);
    const std::uint32_t word = (generation_of(address) - first_generation_) << BlockMeta::kStateBits;
    return (first_of_ == nullptr || first_of_[slot] == block) &&
           meta_[slot].word == (word | static_cast<std::uint32_t>(state));
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
  struct FreeMemory {
    void operator()(std::uint32_t* memory) const noexcept { std::free(memory); }
  };
  using Numbers = std::unique_ptr<std::uint32_t[], FreeMemory>;

  BlockStore(Medium medium, std::uint32_t blocks, std::uint32_t numbers, std::uint32_t slots, bool has_free_set,
             std::uint32_t first_generation, std::uint32_t last_generation);

  const BlockMeta& meta(std::uint32_t block) const noexcept {
    KVPOOL_DCHECK(block < numbers_);
    return meta_[slot_of(block)];
  }
  BlockMeta& owned_meta(std::uint32_t block) noexcept {
    KVPOOL_DCHECK(block < numbers_ && block == block_in(slot_of(block)) && is_owned(meta_[slot_of(block)].state()));
    return meta_[slot_of(block)];
  }
  // Whether the block has its slot, in this generation.
  bool is_current(std::uint32_t block, std::uint32_t generation) const noexcept {
    const std::uint32_t slot = slot_of(block);
    return (first_of_ == nullptr || first_of_[slot] == block) &&
           meta_[slot].releases() + first_generation_ == generation;
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

  MetaArray meta_;                   // of each slot
  Numbers first_of_;                 // of each slot its block, if numbers are told
  std::uint64_t apart_inverse_ = 1;  // slot_of() divides by multiplying and shifting
  int apart_shift_ = 0;
  std::uint32_t capacity_;
  std::uint32_t numbers_;
  std::uint32_t slots_;
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
