#include "kvpool/blocks/block_store.h"

#include <algorithm>
#include <bit>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::uint32_t prefix_of(std::uint32_t instance, Medium medium) noexcept {
  return instance << kMediumBits | static_cast<std::uint32_t>(medium);
}

std::uint32_t slots_of(const BlockStore::Placed& placed) noexcept {
  return placed.numbers / placed.apart + (placed.numbers % placed.apart == 0 ? 0 : 1);
}

[[noreturn]] void audit_failed(Medium medium, const std::string& what, std::uint32_t block) {
  throw Error(ErrorCode::kAudit,
              std::string(medium_name(medium)) + " blocks: " + what + " (block " + std::to_string(block) + ")",
              {{"block", block}});
}

}  // namespace

BlockStore::BlockStore(Medium medium, std::uint32_t blocks, std::uint32_t numbers, std::uint32_t slots,
                       bool has_free_set, std::uint32_t first_generation, std::uint32_t last_generation)
    : meta_(make_meta(slots)),
      capacity_(blocks),
      numbers_(numbers),
      slots_(slots),
      has_free_set_(has_free_set),
      first_generation_(first_generation),
      last_generation_(last_generation),
      local_prefix_(prefix_of(0, medium)),
      own_prefix_(local_prefix_),
      made_prefix_(local_prefix_),
      medium_(medium),
      free_(meta_.get(), has_free_set ? numbers : 0) {
  KVPOOL_CHECK(is_medium(static_cast<std::uint32_t>(medium)));
  KVPOOL_CHECK(0 < first_generation && first_generation <= last_generation && last_generation <= kGenerationMax);
  counts_[static_cast<std::size_t>(BlockState::kFree)] = blocks;
}

// A number n < 2^24 divided by `apart` is n * inverse >> shift: the inverse is at most 1 / 2^39 of itself too large, so
// the product by less than 2^-14 / apart of a slot, and a remainder leaves at least 1 / apart.
BlockStore::BlockStore(Medium medium, std::uint32_t blocks, Placed placed, std::uint32_t first_generation,
                       std::uint32_t last_generation)
    : BlockStore(medium, blocks, placed.numbers, slots_of(placed), false, first_generation, last_generation) {
  KVPOOL_CHECK(placed.apart >= 1 && blocks <= slots_);
  const std::uint32_t apart = std::min(placed.apart, kBlocksMax);  // the shift stays below 64
  apart_shift_ = 38 + std::bit_width(apart);
  apart_inverse_ = ((std::uint64_t{1} << apart_shift_) + apart - 1) / apart;
  // calloc, because large zeroed memory comes from the kernel untouched.
  first_of_.reset(static_cast<std::uint32_t*>(std::calloc(std::max(slots_, 1U), sizeof(std::uint32_t))));
  if (first_of_ != nullptr) return;
  throw Error(ErrorCode::kOutOfMemory, "no memory for the numbers of " + std::to_string(slots_) + " blocks",
              {{"bytes", static_cast<std::int64_t>(slots_ * sizeof(std::uint32_t))}});
}

BlockStore::~BlockStore() = default;

void BlockStore::accept_instance(std::uint32_t instance) noexcept {
  KVPOOL_CHECK(instance <= kInstanceMax);
  KVPOOL_DCHECK(made_prefix_ == local_prefix_);
  own_prefix_ = prefix_of(instance, medium_);
}

void BlockStore::set_instance(std::uint32_t instance) noexcept {
  KVPOOL_CHECK(instance <= kInstanceMax);
  own_prefix_ = made_prefix_ = prefix_of(instance, medium_);
}

bool BlockStore::take(std::uint32_t n, BlockState to, Address* out) noexcept {
  KVPOOL_DCHECK(is_owned(to) && has_free_set_);
  if (n > free_count()) return false;
  while (n > 0) {
    std::uint32_t head = free_.best_fit(n);
    std::uint32_t piece = n;
    if (head == FreeSet::kNone) {
      head = free_.longest();
      piece = free_.length(head);
    }
    free_.remove_front(head, piece);
    hand_out(head, piece, to, out);
    out += piece;
    n -= piece;
  }
  return true;
}

bool BlockStore::take_block(std::uint32_t block, BlockState to, Address* out) noexcept {
  KVPOOL_DCHECK(is_owned(to) && has_free_set_);
  if (block >= capacity_ || !meta_[block].is_free()) return false;
  free_.remove(block, 1);
  hand_out(block, 1, to, out);
  return true;
}

void BlockStore::hand_out(std::uint32_t first, std::uint32_t n, BlockState to, Address* out) noexcept {
  static_assert(kGenerationShift > BlockMeta::kStateBits && static_cast<int>(BlockState::kFree) == 0);
  // A free block's word is its releases above zeros, so shifting it puts them where the address has its generation,
  // which is the first one plus the releases. That never carries: a block that is not retired has at most
  // releases_max() of them.
  const Address base =
      static_cast<Address>(made_prefix_) << kMediumShift | Address{first_generation_} << kGenerationShift | first;
  BlockMeta* const meta = meta_.get() + first;
  for (std::uint32_t i = 0; i < n; ++i) {
    const std::uint32_t word = meta[i].word;
    meta[i].word = word | static_cast<std::uint32_t>(to);
    out[i] = base + i + (static_cast<Address>(word) << (kGenerationShift - BlockMeta::kStateBits));
  }
  counts_[static_cast<std::size_t>(BlockState::kFree)] -= n;
  counts_[static_cast<std::size_t>(to)] += n;
}

void BlockStore::release(std::uint32_t first, std::uint32_t n) noexcept {
  KVPOOL_DCHECK(has_free_set_ && n <= capacity_ && first <= capacity_ - n);
  BlockMeta* const meta = meta_.get();
  released_ += n;
  const std::uint32_t last_release = releases_max();
  const std::uint32_t end = first + n;
  std::uint32_t piece = first;  // [piece, block) is free again but not yet in the free set
  for (std::uint32_t block = first; block < end;) {
    // Neighbours in one state are one batch, so that the counters cost by the batch and not by the block.
    KVPOOL_DCHECK(!meta[block].filling());
    const std::uint32_t state = meta[block].word & BlockMeta::kStateMask;
    KVPOOL_DCHECK(is_owned(static_cast<BlockState>(state)));
    const std::uint32_t batch = block;
    std::uint32_t unstated = 0;
    for (; block < end; ++block) {
      unstated = meta[block].word - state;
      // One comparison for two ends of the batch. Rotated, the releases are in the low bits, and above them is what
      // the subtraction left of the state: nothing, if it was this batch's.
      if (std::rotr(unstated, BlockMeta::kStateBits) >= last_release) break;
      meta[block].overwrite(unstated + BlockMeta::kOneRelease);
    }
    counts_[state] -= block - batch;
    counts_[static_cast<std::size_t>(BlockState::kFree)] += block - batch;
    if (block < end && unstated == last_release << BlockMeta::kStateBits) {
      meta[block].overwrite(unstated + BlockMeta::kOneRelease);
      meta[block].set_state(BlockState::kRetired);
      --counts_[state];
      ++counts_[static_cast<std::size_t>(BlockState::kRetired)];
      if (block > piece) free_.insert(piece, block - piece);
      piece = ++block;
    }
  }
  if (end > piece) free_.insert(piece, end - piece);
}

void BlockStore::place(std::uint32_t first, std::uint32_t step, std::uint32_t n, BlockState to, Address* out) noexcept {
  KVPOOL_DCHECK(is_owned(to) && !has_free_set_);
  const Address base = static_cast<Address>(made_prefix_) << kMediumShift | Address{first_generation_}
                                                                                << kGenerationShift;
  const std::uint32_t slot_step = slot_of(step);
  std::uint32_t block = first;
  std::uint32_t slot = slot_of(first);
  std::uint32_t given = generations_given_ << BlockMeta::kStateBits;
  BlockMeta* const meta = meta_.get();
  std::uint32_t* const first_of = first_of_.get();
  for (std::uint32_t i = 0; i < n; ++i, block += step, slot += slot_step) {
    KVPOOL_DCHECK(slot == slot_of(block) && meta[slot].is_free());
    const std::uint32_t word = meta[slot].word;  // as in hand_out()
    given = std::max(given, word + BlockMeta::kOneRelease);
    meta[slot].word = word | static_cast<std::uint32_t>(to);
    first_of[slot] = block;
    out[i] = base + block + (static_cast<Address>(word) << (kGenerationShift - BlockMeta::kStateBits));
  }
  generations_given_ = given >> BlockMeta::kStateBits;
  counts_[static_cast<std::size_t>(BlockState::kFree)] -= n;
  counts_[static_cast<std::size_t>(to)] += n;
}

std::uint32_t BlockStore::unplace(std::uint32_t first, std::uint32_t step, std::uint32_t n) noexcept {
  KVPOOL_DCHECK(!has_free_set_ && n > 0);
  const std::uint32_t slot_step = slot_of(step);
  const std::uint32_t last_release = releases_max();
  BlockMeta* const meta = meta_.get();
  std::uint32_t slot = slot_of(first);
  for (std::uint32_t gone = 0; gone < n;) {
    // As in release().
    const std::uint32_t state = meta[slot].word & BlockMeta::kStateMask;
    const std::uint32_t batch = gone;
    std::uint32_t unstated = 0;
    for (; gone < n; ++gone, slot += slot_step) {
      KVPOOL_DCHECK(block_in(slot) == first + gone * step && is_owned(meta[slot].state()) && !meta[slot].filling());
      unstated = meta[slot].word - state;
      if (std::rotr(unstated, BlockMeta::kStateBits) >= last_release) break;
      meta[slot].overwrite(unstated + BlockMeta::kOneRelease);
    }
    counts_[state] -= gone - batch;
    counts_[static_cast<std::size_t>(BlockState::kFree)] += gone - batch;
    released_ += gone - batch;
    if (gone < n && unstated == last_release << BlockMeta::kStateBits) {
      meta[slot].overwrite(unstated + BlockMeta::kOneRelease);
      meta[slot].set_state(BlockState::kRetired);
      --counts_[state];
      ++counts_[static_cast<std::size_t>(BlockState::kRetired)];
      ++released_;
      return gone;
    }
  }
  return n;
}

void BlockStore::suspend() noexcept {
  KVPOOL_DCHECK(has_free_set_ && free_count() + count(BlockState::kRetired) == capacity_);
  for_each_run_in(BlockState::kFree, [&](std::uint32_t first, std::uint32_t n) {
    free_.remove(first, n);
    move_run(first, n, BlockState::kFree, BlockState::kSuspended);
  });
}

void BlockStore::resume() noexcept {
  for_each_run_in(BlockState::kSuspended, [&](std::uint32_t first, std::uint32_t n) {
    move_run(first, n, BlockState::kSuspended, BlockState::kFree);
    free_.insert(first, n);
  });
}

template <class Visit>
void BlockStore::for_each_run_in(BlockState state, Visit&& visit) {
  for (std::uint32_t block = 0; block < capacity_;) {
    const std::uint32_t first = block;
    while (block < capacity_ && meta_[block].state() == state) ++block;
    if (block == first) {
      ++block;
    } else {
      visit(first, block - first);
    }
  }
}

void BlockStore::move_run(std::uint32_t first, std::uint32_t n, BlockState from, BlockState to) noexcept {
  for (std::uint32_t block = first; block < first + n; ++block) meta_[block].set_state(to);
  counts_[static_cast<std::size_t>(from)] -= n;
  counts_[static_cast<std::size_t>(to)] += n;
}

AddressFault BlockStore::fault_of(Address address) const noexcept {
  const std::uint32_t instance_bits = instance_of(address);
  if (instance_bits != 0 && instance_bits != instance()) return AddressFault::kForeign;
  if (medium_bits_of(address) != static_cast<std::uint32_t>(medium_)) return AddressFault::kNoMedium;
  const std::uint32_t block = block_of(address);
  if (block >= numbers_) return AddressFault::kOutOfRange;
  return is_current(block, generation_of(address)) ? AddressFault::kNone : AddressFault::kStale;
}

void BlockStore::set_generation_for_test(std::uint32_t block, std::uint32_t generation) noexcept {
  KVPOOL_CHECK(block < numbers_ && meta(block).is_free());
  KVPOOL_CHECK(generation >= first_generation_ && generation <= last_generation_);
  meta_[slot_of(block)].word = (generation - first_generation_) << BlockMeta::kStateBits;
}

FreeRuns BlockStore::free_runs() const noexcept {
  const std::uint32_t head = free_.longest();
  return {free_.runs(), head == FreeSet::kNone ? 0 : free_.length(head)};
}

std::uint64_t BlockStore::metadata_bytes() const noexcept {
  const std::uint64_t a_slot = sizeof(BlockMeta) + (first_of_ == nullptr ? 0 : sizeof(std::uint32_t));
  return slots_ * a_slot + sizeof(BlockStore);
}

void BlockStore::audit() const {
  std::array<std::uint32_t, kBlockStateCount> found{};
  for (std::uint32_t slot = 0; slot < slots_; ++slot) {
    const BlockMeta& block_meta = meta_[slot];
    const std::uint32_t block = block_in(slot);
    const auto state = static_cast<std::size_t>(block_meta.state());
    if (state >= found.size()) audit_failed(medium_, "unknown state " + std::to_string(state), block);
    ++found[state];
    if (block_meta.filling() && block_meta.state() != BlockState::kHistorical) {
      audit_failed(medium_, "a block is being filled, and not historical", block);
    }
    if (!block_meta.is_free() && (block >= numbers_ || slot_of(block) != slot)) {
      audit_failed(medium_, "a block has a slot that is not its own", block);
    }
    const bool retired = block_meta.state() == BlockState::kRetired;
    if ((block_meta.releases() > releases_max()) != retired) {
      audit_failed(medium_, "a block is retired before its time, or not at it", block);
    }
    // A retired block has one release more than the last address that it had.
    const std::uint32_t given = block_meta.releases() + (retired ? 0 : 1);
    if (!has_free_set_ && !block_meta.is_free() && given > generations_given_) {
      audit_failed(medium_, "a block has a generation above all that were given out", block);
    }
  }
  // Slots that no block has are free, too.
  found[static_cast<std::size_t>(BlockState::kFree)] -= slots_ - capacity_;
  for (std::size_t state = 0; state < found.size(); ++state) {
    if (found[state] == counts_[state]) continue;
    throw Error(ErrorCode::kAudit,
                std::string(medium_name(medium_)) + " blocks: " + std::to_string(found[state]) + " are " +
                    block_state_name(static_cast<BlockState>(state)) + ", but " + std::to_string(counts_[state]) +
                    " were counted",
                {{"found", found[state]}, {"counted", counts_[state]}});
  }
  if (has_free_set_) free_.audit(medium_name(medium_));
}

}  // namespace kvpool
