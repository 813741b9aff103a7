#include "kvpool/pool/peer_claims.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// Everything that reads blocks reads memory.
void check_none_on_disk(std::span<const Address> addresses) {
  const auto found = std::ranges::find(addresses, static_cast<std::uint32_t>(Medium::kDisk), medium_bits_of);
  if (found == addresses.end()) return;
  const auto position = static_cast<std::int64_t>(found - addresses.begin());
  throw Error(ErrorCode::kUnsupported,
              "address " + std::to_string(*found) + " (position " + std::to_string(position) +
                  ") lies on DISK, where nothing can read it directly: bring it up with swap_in or match(into=...)",
              {{"address", static_cast<std::int64_t>(*found)}, {"position", position}});
}

}  // namespace

bool PeerClaims::take(std::size_t n, MediumChoice medium, BlockState to, std::uint64_t incarnation, std::uint32_t mark,
                      bool evict, Address* out) {
  const BlockOwner owner{to, incarnation, mark};
  if (!evict) return allocator_.try_take(n, medium, owner, out);
  allocator_.take_evicting(n, medium, owner, out, {});
  return true;
}

void PeerClaims::release(const Address* addresses, std::size_t n) noexcept {
  const SpaceLock lock = blocks_.lock();
  if (!blocks_.engine_allocates()) return blocks_.release(addresses, n);
  for (std::size_t i = 0; i < n; ++i) {
    if (medium_bits_of(addresses[i]) == static_cast<std::uint32_t>(Medium::kHbm)) {
      blocks_.give({&addresses[i], 1}, {BlockState::kActive, 0, 0});  // the engine's, until it frees it
    } else {
      blocks_.release(&addresses[i], 1);
    }
  }
}

void PeerClaims::quarantine(const Address* addresses, std::size_t n) noexcept {
  const SpaceLock lock = blocks_.lock();
  for (std::size_t i = 0; i < n; ++i) blocks_.set_state(addresses[i], BlockState::kQuarantined);
}

void PeerClaims::check_reserved(const Address* addresses, std::size_t n, std::uint64_t incarnation,
                                std::uint32_t mark) {
  guard_.check();
  const SpaceLock lock = blocks_.lock();
  blocks_.check_reserved(addresses, n, incarnation, mark);
}

BlockOwner PeerClaims::owner_of(Address address) noexcept {
  if (address == 0) return {};
  const SpaceLock lock = blocks_.lock();
  return blocks_.owner_of(address);
}

void PeerClaims::take_over(const Address* addresses, std::size_t n) noexcept {
  const SpaceLock lock = blocks_.lock();
  blocks_.give({addresses, n}, {BlockState::kActive, 0, 0});
}

// Only active blocks can be inserted. If they became active without the lock, a holder of the address of a lent block
// could free it before the index has it.
IndexPin PeerClaims::insert_arrived(std::string_view name_space, const InsertItem& item, std::span<Address> arrived) {
  guard_.check();
  const SpaceLock lock = blocks_.lock();
  // Under the lock: set_instance() puts the id into what the index has, and what comes after must have it already.
  for (Address& address : arrived) address = blocks_.as_made(address);
  cache_.check_arrival(name_space, item);
  const BlockOwner before = arrived.empty() ? BlockOwner() : blocks_.owner_of(arrived[0]);
  blocks_.give(arrived, {BlockState::kActive, 0, 0});
  IndexPin pin;
  try {
    pin = cache_.insert(name_space, {&item, 1}, /*free_duplicates=*/true).front().pin;
  } catch (...) {
    blocks_.give(arrived, before);
    throw;
  }
  cache_.audit_if_asked();
  return pin;
}

void PeerClaims::reserve_active(const Address* addresses, std::size_t n, std::uint64_t incarnation,
                                std::uint32_t mark) {
  guard_.check();
  const SpaceLock lock = blocks_.lock();
  blocks_.check_active_and_distinct(addresses, n, /*skip_cached=*/false);
  blocks_.check_unread(addresses, n);
  blocks_.give({addresses, n}, {BlockState::kReserved, incarnation, mark});
}

void PeerClaims::lend_active(const Address* addresses, std::size_t n, std::uint64_t incarnation) {
  guard_.check();
  const SpaceLock lock = blocks_.lock();
  blocks_.check_active_and_distinct(addresses, n, /*skip_cached=*/false);
  blocks_.check_unread(addresses, n);
  for (std::size_t i = 0; i < n; ++i) {
    if (blocks_.engine_allocates() && medium_of(addresses[i]) == Medium::kHbm) continue;
    throw Error(ErrorCode::kState,
                "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                    ") is not of a block that an engine allocates: peers borrow others by alloc(n, instance=...)",
                {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
  blocks_.give({addresses, n}, {BlockState::kLent, incarnation, 0});
}

IndexHit PeerClaims::match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out) {
  guard_.check();
  const SpaceLock lock = blocks_.lock();
  return cache_.match_for_peer(name_space, tokens, n_tokens, out);
}

void PeerClaims::hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_incarnation) {
  guard_.check();
  check_none_on_disk({addresses, n});
  const SpaceLock lock = blocks_.lock();
  blocks_.hold_for_reading(addresses, n, for_incarnation);
  if (for_incarnation == 0) return;
  try {
    cache_.check_found({addresses, n});
  } catch (...) {
    blocks_.release_reading(addresses, n);
    throw;
  }
}

void PeerClaims::release_reading(const Address* addresses, std::size_t n) noexcept {
  if (guard_.in_child()) return;
  const SpaceLock lock = blocks_.lock();
  blocks_.release_reading(addresses, n);
}

}  // namespace kvpool
