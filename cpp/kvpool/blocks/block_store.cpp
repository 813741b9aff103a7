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

[[noreturn]] void audit_failed(Medium medium, const std::string& what, std::uint32_t block) {
  throw Error(ErrorCode::kAudit,
              std::string(medium_name(medium)) + " blocks: " + what + " (block " + std::to_string(block) + ")",
              {{"block", block}});
}

}  // namespace

BlockStore::BlockStore(Medium medium, std::uint32_t blocks, std::uint32_t numbers, bool has_free_set,
                       std::uint32_t first_generation, std::uint32_t last_generation)
    : meta_(make_meta(numbers)),
      capacity_(blocks),
      numbers_(numbers),
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
  std::uint32_t block = first;
  for (std::uint32_t i = 0; i < n; ++i, block += step) {
    KVPOOL_DCHECK(meta(block).is_free());
    const std::uint32_t word = meta_[block].word;  // as in hand_out()
    generations_given_ = std::max(generations_given_, (word >> BlockMeta::kStateBits) + 1);
    meta_[block].word = word | static_cast<std::uint32_t>(to);
    out[i] = base + block + (static_cast<Address>(word) << (kGenerationShift - BlockMeta::kStateBits));
  }
  counts_[static_cast<std::size_t>(BlockState::kFree)] -= n;
  counts_[static_cast<std::size_t>(to)] += n;
}

bool BlockStore::unplace(std::uint32_t block) noexcept {
  KVPOOL_DCHECK(!has_free_set_ && !meta(block).filling());
  BlockMeta& block_meta = owned_meta(block);
  const auto state = static_cast<std::size_t>(block_meta.state());
  const bool last = block_meta.releases() == releases_max();
  block_meta.overwrite(block_meta.word - static_cast<std::uint32_t>(state) + BlockMeta::kOneRelease);
  const BlockState after = last ? BlockState::kRetired : BlockState::kFree;
  block_meta.set_state(after);
  --counts_[state];
  ++counts_[static_cast<std::size_t>(after)];
  ++released_;
  return !last;
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
  return generation(block) == generation_of(address) ? AddressFault::kNone : AddressFault::kStale;
}

void BlockStore::set_generation_for_test(std::uint32_t block, std::uint32_t generation) noexcept {
  KVPOOL_CHECK(block < numbers_ && meta_[block].is_free());
  KVPOOL_CHECK(generation >= first_generation_ && generation <= last_generation_);
  meta_[block].word = (generation - first_generation_) << BlockMeta::kStateBits;
}

FreeRuns BlockStore::free_runs() const noexcept {
  const std::uint32_t head = free_.longest();
  return {free_.runs(), head == FreeSet::kNone ? 0 : free_.length(head)};
}

std::uint64_t BlockStore::metadata_bytes() const noexcept {
  return static_cast<std::uint64_t>(numbers_) * sizeof(BlockMeta) + sizeof(BlockStore);
}

void BlockStore::audit() const {
  std::array<std::uint32_t, kBlockStateCount> found{};
  for (std::uint32_t block = 0; block < numbers_; ++block) {
    const BlockMeta& block_meta = meta_[block];
    const auto state = static_cast<std::size_t>(block_meta.state());
    if (state >= found.size()) audit_failed(medium_, "unknown state " + std::to_string(state), block);
    ++found[state];
    if (block_meta.filling() && block_meta.state() != BlockState::kHistorical) {
      audit_failed(medium_, "a block is being filled, and not historical", block);
    }
    if ((block_meta.releases() > releases_max()) != (block_meta.state() == BlockState::kRetired)) {
      audit_failed(medium_, "a block is retired before its time, or not at it", block);
    }
  }
  // Numbers that no block has are free, too.
  found[static_cast<std::size_t>(BlockState::kFree)] -= numbers_ - capacity_;
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
