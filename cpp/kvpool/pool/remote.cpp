// Blocks of this pool that peers write or read: the states reserved, lent and quarantined, and holds for reading.
//
//   L1  A block that is reserved or lent carries its owner's epoch as its tag, and the transfer's mark.
//   L2  A block that somebody reads for a transfer is not reused before the last reader lets go, whatever was done to
//       it meanwhile: it waits in state reserved, with kUnreadTag.
//   L3  Where the engine allocates, an HBM block is the engine's from adopt() to free(). It is active then; while a
//       fetch of the engine fills it, reserved or quarantined. It is never cached or lent; only the engine frees it.
#include <algorithm>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/pool/pool.h"

namespace kvpool {

void Pool::set_instance(std::uint32_t instance) {
  guard();
  if (instance == 0 || instance > kInstanceMax) {
    throw Error(ErrorCode::kArgument,
                "instance ids are 1 to " + std::to_string(kInstanceMax) + ", and this is " + std::to_string(instance),
                {{"instance", instance}, {"maximum", kInstanceMax}});
  }
  const std::lock_guard lock(mutex_);
  if (instance_ == instance) return;
  if (instance_ != 0) {
    throw Error(ErrorCode::kState, "the pool is instance " + std::to_string(instance_) + " already",
                {{"instance", instance_}});
  }
  instance_ = instance;
  for (BlockStore& blocks : stores_) blocks.set_instance(instance);
  index_->set_instance(instance);
  // What is cached gets the id too, so that addresses of matches mean something to others.
  index_->for_each_node([&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote) return;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      node.payload.values[i] |= static_cast<Address>(instance) << kInstanceShift;
    }
  });
}

bool Pool::take_for_peer(std::size_t n, Medium medium, BlockState to, std::uint64_t epoch, std::uint32_t mark,
                         bool evict, Address* out) {
  guard_alloc(medium);
  std::unique_lock reclaim(reclaim_, std::defer_lock);
  if (evict) reclaim.lock();
  Lock lock(mutex_);
  guard();
  if (evict) {
    take_evicting(lock, n, medium, to, out);
  } else if (!take(n, medium, to, out)) {
    return false;
  }
  give_tags(out, n, epoch, mark);
  audit_if_asked();
  zero_if_asked(lock, out, n);  // a borrower can read what it borrows
  return true;
}

void Pool::give_tags(const Address* addresses, std::size_t n, std::uint64_t epoch, std::uint32_t mark) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    store_of(addresses[i]).set_tag(block_of(addresses[i]), epoch);
    store_of(addresses[i]).set_mark(block_of(addresses[i]), mark);
  }
}

void Pool::release_from_peer(const Address* addresses, std::size_t n) noexcept {
  const std::lock_guard lock(mutex_);
  if (!engine_allocates_) return release_blocks(addresses, n);
  for (std::size_t i = 0; i < n; ++i) {
    if (medium_bits_of(addresses[i]) == static_cast<std::uint32_t>(Medium::kHbm)) {
      give_locked({&addresses[i], 1}, {BlockState::kActive, 0, 0});  // the engine's, until it frees it
    } else {
      release_blocks(&addresses[i], 1);
    }
  }
}

void Pool::quarantine(const Address* addresses, std::size_t n) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i)
    store_of(addresses[i]).set_state(block_of(addresses[i]), BlockState::kQuarantined);
}

void Pool::check_writable(const Address* addresses, std::size_t n, std::uint64_t epoch, std::uint32_t mark,
                          bool lent_only) {
  guard();
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i) {
    check(addresses[i], i, std::nullopt);
    const BlockStore& blocks = store_of(addresses[i]);
    const std::uint32_t block = block_of(addresses[i]);
    const BlockState state = blocks.state(block);
    const bool lent = state == BlockState::kLent && blocks.tag(block) == epoch;
    const bool reserved = state == BlockState::kReserved && blocks.tag(block) == epoch && blocks.mark(block) == mark &&
                          epoch != kUnreadTag;  // no peer of ours has this epoch
    if (lent || (reserved && !lent_only)) continue;
    throw Error(ErrorCode::kNotOwner,
                "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                    "): the block is neither lent to you nor reserved for this transfer",
                {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
}

Pool::Ownership Pool::ownership_of(Address address) noexcept {
  if (address == 0) return {};
  const std::lock_guard lock(mutex_);
  return ownership_locked(address);
}

Pool::Ownership Pool::ownership_locked(Address address) noexcept {
  const BlockStore& blocks = store_of(address);
  const std::uint32_t block = block_of(address);
  return {blocks.state(block), blocks.tag(block), blocks.mark(block)};
}

void Pool::give_locked(std::span<const Address> addresses, const Ownership& to) noexcept {
  for (const Address address : addresses) store_of(address).set_state(block_of(address), to.state);
  give_tags(addresses.data(), addresses.size(), to.epoch, to.mark);
}

void Pool::take_over(const Address* addresses, std::size_t n) noexcept {
  const std::lock_guard lock(mutex_);
  give_locked({addresses, n}, {BlockState::kActive, 0, 0});
}

// What the index is given has to be active. If that were so without the lock, whoever knows the address of a block
// that was lent, and told of, could free it before the index has it.
IndexPin Pool::insert_arrived(std::string_view name_space, const InsertItem& item, std::span<const Address> arrived) {
  guard();
  const std::lock_guard lock(mutex_);
  const Ownership before = arrived.empty() ? Ownership() : ownership_locked(arrived[0]);
  give_locked(arrived, {BlockState::kActive, 0, 0});
  IndexPin pin;
  try {
    pin = insert_locked(name_space, {&item, 1}, /*free_duplicates=*/true).front().pin;
  } catch (...) {
    give_locked(arrived, before);
    throw;
  }
  audit_if_asked();
  return pin;
}

void Pool::reserve_active(const Address* addresses, std::size_t n, std::uint64_t epoch, std::uint32_t mark) {
  guard();
  const std::lock_guard lock(mutex_);
  check_active_and_distinct(addresses, n, /*skip_cached=*/false);
  give_locked({addresses, n}, {BlockState::kReserved, epoch, mark});
}

IndexHit Pool::match_for_peer(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out) {
  guard();
  const std::lock_guard lock(mutex_);
  IndexHit hit = index_->match(name_space, tokens, n_tokens, out);
  std::size_t local = 0;
  while (local < hit.pages && is_local(out[local])) ++local;
  hit.pages = local;
  return hit;
}

// --- reading ---

void Pool::hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_epoch) {
  guard();
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < kMediaCount; ++i) {
    if (readers_[i].empty()) readers_[i].resize(stores_[i].capacity());
  }
  for (std::size_t i = 0; i < n; ++i) {
    try {
      check(addresses[i], i, std::nullopt);
      const BlockStore& blocks = store_of(addresses[i]);
      const BlockState state = blocks.state(block_of(addresses[i]));
      if (state == BlockState::kLent && for_epoch != 0 && blocks.tag(block_of(addresses[i])) != for_epoch) {
        throw Error(ErrorCode::kNotOwner,
                    "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                        "): the block is lent to another peer",
                    {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
      }
      std::uint16_t& readers = readers_[medium_bits_of(addresses[i]) - 1][block_of(addresses[i])];
      const bool readable =
          state == BlockState::kActive || state == BlockState::kHistorical || state == BlockState::kLent;
      if (readable && readers < UINT16_MAX) {
        ++readers;
        continue;
      }
      const std::string why = readable ? "too many transfers read it" : block_state_name(state);
      throw Error(ErrorCode::kState,
                  "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                      "): the block cannot be sent: " + why,
                  {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
    } catch (...) {
      for (std::size_t j = 0; j < i; ++j) --readers_[medium_bits_of(addresses[j]) - 1][block_of(addresses[j])];
      throw;
    }
  }
}

// What an engine frees it uses again at once, whatever the pool says: as long as a transfer reads it, it must not.
// Leaves out those of other instances.
void Pool::check_unread(const Address* addresses, std::size_t n) const {
  for (std::size_t i = 0; i < n; ++i) {
    if (!is_local(addresses[i])) continue;
    const auto& readers = readers_[medium_bits_of(addresses[i]) - 1];
    if (readers.empty() || readers[block_of(addresses[i])] == 0) continue;
    throw Error(ErrorCode::kState,
                "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                    "): a transfer reads the block; wait for it, or cancel it",
                {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
}

void Pool::release_reading(const Address* addresses, std::size_t n) noexcept {
  if (made_in_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i) {
    BlockStore& blocks = store_of(addresses[i]);
    const std::uint32_t block = block_of(addresses[i]);
    std::uint16_t& readers = readers_[medium_bits_of(addresses[i]) - 1][block];
    if (--readers > 0 || blocks.state(block) != BlockState::kReserved || blocks.tag(block) != kUnreadTag) continue;
    blocks.release(block, 1);
  }
}

}  // namespace kvpool
