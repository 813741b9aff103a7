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

const char* block_state_name(BlockState state) noexcept {
  switch (state) {
    case BlockState::kFree:
      return "free";
    case BlockState::kActive:
      return "active";
    case BlockState::kHistorical:
      return "historical";
    case BlockState::kReserved:
      return "reserved";
    case BlockState::kLent:
      return "lent";
    case BlockState::kQuarantined:
      return "quarantined";
    case BlockState::kRetired:
      return "retired";
    case BlockState::kOverlapped:
      return "overlapped";
    case BlockState::kSuspended:
      return "suspended";
  }
  return "unknown";
}

// calloc, because large zeroed memory comes from the kernel untouched.
BlockStore::MetaArray BlockStore::make_meta(std::uint32_t blocks) {
  KVPOOL_CHECK(blocks <= kBlocksMax);
  const std::size_t entries = std::max(blocks, 1U);
  MetaArray meta(static_cast<BlockMeta*>(std::calloc(entries, sizeof(BlockMeta))));
  if (meta == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, "no memory for the metadata of " + std::to_string(blocks) + " blocks",
                {{"bytes", static_cast<std::int64_t>(entries * sizeof(BlockMeta))}});
  }
  return meta;
}

BlockStore::BlockStore(Medium medium, std::uint32_t blocks, std::uint32_t first_generation,
                       std::uint32_t last_generation)
    : meta_(make_meta(blocks)),
      capacity_(blocks),
      first_generation_(first_generation),
      last_generation_(last_generation),
      local_prefix_(prefix_of(0, medium)),
      own_prefix_(local_prefix_),
      made_prefix_(local_prefix_),
      medium_(medium),
      free_(meta_.get(), blocks) {
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
  KVPOOL_DCHECK(is_owned(to));
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
  KVPOOL_DCHECK(is_owned(to));
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
  KVPOOL_DCHECK(n <= capacity_ && first <= capacity_ - n);
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

void BlockStore::overlap(std::uint32_t first, std::uint32_t n) noexcept { withdraw(first, n, BlockState::kOverlapped); }

void BlockStore::end_overlap(std::uint32_t first, std::uint32_t n) noexcept {
  put_back(first, n, BlockState::kOverlapped);
}

void BlockStore::suspend() noexcept {
  KVPOOL_DCHECK(free_count() + count(BlockState::kRetired) == capacity_);
  withdraw(0, capacity_, BlockState::kSuspended);
}

void BlockStore::resume() noexcept {
  for (std::uint32_t block = 0; block < capacity_;) {
    const std::uint32_t run = block;
    while (block < capacity_ && meta_[block].state() == BlockState::kSuspended) ++block;
    if (block > run) {
      put_back(run, block - run, BlockState::kSuspended);
    } else {
      ++block;  // retired
    }
  }
}

void BlockStore::withdraw(std::uint32_t first, std::uint32_t n, BlockState to) noexcept {
  KVPOOL_DCHECK(n <= capacity_ && first <= capacity_ - n);
  const std::uint32_t end = first + n;
  for (std::uint32_t block = first; block < end;) {
    if (!meta_[block].is_free()) {
      KVPOOL_DCHECK(meta_[block].state() == to || meta_[block].state() == BlockState::kRetired);
      ++block;
      continue;
    }
    const std::uint32_t run = block;
    while (block < end && meta_[block].is_free()) ++block;
    free_.remove(run, block - run);
    for (std::uint32_t i = run; i < block; ++i) meta_[i].set_state(to);
    counts_[static_cast<std::size_t>(BlockState::kFree)] -= block - run;
    counts_[static_cast<std::size_t>(to)] += block - run;
  }
}

void BlockStore::put_back(std::uint32_t first, std::uint32_t n, BlockState from) noexcept {
  KVPOOL_DCHECK(n > 0 && n <= capacity_ && first <= capacity_ - n);
  for (std::uint32_t block = first; block < first + n; ++block) {
    KVPOOL_DCHECK(meta_[block].state() == from);
    meta_[block].set_state(BlockState::kFree);
  }
  counts_[static_cast<std::size_t>(from)] -= n;
  counts_[static_cast<std::size_t>(BlockState::kFree)] += n;
  free_.insert(first, n);
}

AddressFault BlockStore::fault_of(Address address) const noexcept {
  const std::uint32_t instance_bits = instance_of(address);
  if (instance_bits != 0 && instance_bits != instance()) return AddressFault::kForeign;
  if (medium_bits_of(address) != static_cast<std::uint32_t>(medium_)) return AddressFault::kNoMedium;
  const std::uint32_t block = block_of(address);
  if (block >= capacity_) return AddressFault::kOutOfRange;
  return generation(block) == generation_of(address) ? AddressFault::kNone : AddressFault::kStale;
}

void BlockStore::set_generation_for_test(std::uint32_t block, std::uint32_t generation) noexcept {
  KVPOOL_CHECK(block < capacity_ && meta_[block].is_free());
  KVPOOL_CHECK(generation >= first_generation_ && generation <= last_generation_);
  meta_[block].word = (generation - first_generation_) << BlockMeta::kStateBits;
}

FreeRuns BlockStore::free_runs() const noexcept {
  const std::uint32_t head = free_.longest();
  return {free_.runs(), head == FreeSet::kNone ? 0 : free_.length(head)};
}

std::uint64_t BlockStore::metadata_bytes() const noexcept {
  return static_cast<std::uint64_t>(capacity_) * sizeof(BlockMeta) + sizeof(BlockStore);
}

void BlockStore::audit() const {
  std::array<std::uint32_t, kBlockStateCount> found{};
  for (std::uint32_t block = 0; block < capacity_; ++block) {
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
  for (std::size_t state = 0; state < found.size(); ++state) {
    if (found[state] == counts_[state]) continue;
    throw Error(ErrorCode::kAudit,
                std::string(medium_name(medium_)) + " blocks: " + std::to_string(found[state]) + " are " +
                    block_state_name(static_cast<BlockState>(state)) + ", but " + std::to_string(counts_[state]) +
                    " were counted",
                {{"found", found[state]}, {"counted", counts_[state]}});
  }
  free_.audit(medium_name(medium_));
}

}  // namespace kvpool
