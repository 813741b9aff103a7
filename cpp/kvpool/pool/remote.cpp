// Blocks of this pool that peers write or read: the states reserved, lent and quarantined, and holds for reading.
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
  space_.set_instance(instance);
  index_->set_instance(instance);
  // What is cached gets the id too, so that addresses of matches mean something to others.
  index_->for_each_node([&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote) return;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      node.payload.values[i] |= static_cast<Address>(instance) << kInstanceShift;
    }
  });
}

bool Pool::take_for_peer(std::size_t n, MediumChoice medium, BlockState to, std::uint64_t epoch, std::uint32_t mark,
                         bool evict, Address* out) {
  guard_alloc(medium);
  std::unique_lock reclaim(reclaim_, std::defer_lock);
  if (evict) reclaim.lock();
  Lock lock(mutex_);
  guard();
  if (evict) {
    take_evicting(lock, n, medium, to, out);
  } else if (!space_.take(n, medium, to, out)) {
    return false;
  }
  space_.give({out, n}, {to, epoch, mark});
  audit_if_asked();
  zero_if_asked(lock, out, n);  // a borrower can read what it borrows
  return true;
}

void Pool::release_from_peer(const Address* addresses, std::size_t n) noexcept {
  const std::lock_guard lock(mutex_);
  if (!space_.engine_allocates()) return space_.release(addresses, n);
  for (std::size_t i = 0; i < n; ++i) {
    if (medium_bits_of(addresses[i]) == static_cast<std::uint32_t>(Medium::kHbm)) {
      space_.give({&addresses[i], 1}, {BlockState::kActive, 0, 0});  // the engine's, until it frees it
    } else {
      space_.release(&addresses[i], 1);
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
  space_.check_writable(addresses, n, epoch, mark, lent_only);
}

BlockOwner Pool::ownership_of(Address address) noexcept {
  if (address == 0) return {};
  const std::lock_guard lock(mutex_);
  return space_.owner_of(address);
}

void Pool::take_over(const Address* addresses, std::size_t n) noexcept {
  const std::lock_guard lock(mutex_);
  space_.give({addresses, n}, {BlockState::kActive, 0, 0});
}

// What the index is given has to be active. If that were so without the lock, whoever knows the address of a block
// that was lent, and told of, could free it before the index has it.
IndexPin Pool::insert_arrived(std::string_view name_space, const InsertItem& item, std::span<const Address> arrived) {
  guard();
  const std::lock_guard lock(mutex_);
  const BlockOwner before = arrived.empty() ? BlockOwner() : space_.owner_of(arrived[0]);
  space_.give(arrived, {BlockState::kActive, 0, 0});
  IndexPin pin;
  try {
    pin = insert_locked(name_space, {&item, 1}, /*free_duplicates=*/true).front().pin;
  } catch (...) {
    space_.give(arrived, before);
    throw;
  }
  audit_if_asked();
  return pin;
}

void Pool::reserve_active(const Address* addresses, std::size_t n, std::uint64_t epoch, std::uint32_t mark) {
  guard();
  const std::lock_guard lock(mutex_);
  space_.check_active_and_distinct(addresses, n, /*skip_cached=*/false);
  space_.give({addresses, n}, {BlockState::kReserved, epoch, mark});
}

IndexHit Pool::match_for_peer(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out) {
  guard();
  const std::lock_guard lock(mutex_);
  IndexHit hit = index_->match(name_space, tokens, n_tokens, out);
  std::size_t local = 0;
  while (local < hit.pages && space_.is_local(out[local])) ++local;
  hit.pages = local;
  return hit;
}

// --- reading ---

void Pool::hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_epoch) {
  guard();
  const std::lock_guard lock(mutex_);
  space_.hold_for_reading(addresses, n, for_epoch);
}

void Pool::release_reading(const Address* addresses, std::size_t n) noexcept {
  if (made_in_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  space_.release_reading(addresses, n);
}

}  // namespace kvpool
