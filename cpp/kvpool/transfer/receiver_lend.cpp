// Blocks that a peer borrows.
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/transfer/receiver.h"
#include "kvpool/transfer/transfer_id.h"

namespace kvpool {

void Receiver::on_lend(const CallPointer& call, const LendBody& body) {
  const auto refused = failure_of([&] {
    const std::lock_guard lock(mutex_);
    check_quota(body.blocks);
    promised_ += body.blocks;
  });
  if (refused) return call->refuse(*refused);
  const auto attempt = [self = shared_from_this(), this, call, body](Room room) {
    std::optional<std::vector<Address>> lent;
    auto error = failure_of([&] { lent = host_.blocks().lend(body.blocks, body.medium, {incarnation_, 0}, room); });
    if (!error && !lent) return false;
    finish_lend(*call, body.blocks, std::move(lent), std::move(error));
    return true;
  };
  // Without room to be made, the answer is quick; what evicts or swaps goes where it keeps nobody waiting.
  if (attempt(first_room(body.may_evict))) return;
  const Room room = body.may_evict ? Room::kEvict : Room::kFree;
  auto failure = failure_of([&] { host_.run(this, [attempt, room] { static_cast<void>(attempt(room)); }); });
  if (failure) finish_lend(*call, body.blocks, std::nullopt, std::move(failure));
}

void Receiver::finish_lend(ServedCall& call, std::size_t blocks, std::optional<std::vector<Address>> lent,
                           std::optional<Error> error) {
  if (!error) {
    error = failure_of([&] {
      const std::lock_guard lock(mutex_);
      if (lost_) throw Error(ErrorCode::kPeerLost, "the peer has gone");
      if (call.cancelled()) throw Error(ErrorCode::kCancelled, "nobody waits for these blocks any more");
      add_lent(*lent);
    });
    if (!error) return answer(call, *lent);
    host_.blocks().release(*lent);
  }
  {
    const std::lock_guard lock(mutex_);
    promised_ -= static_cast<std::uint32_t>(blocks);
  }
  call.refuse(*error);
}

void Receiver::lend_active(std::span<const Address> addresses) {
  const std::lock_guard lock(mutex_);
  if (lost_) throw Error(ErrorCode::kPeerLost, "peer " + peer_ + " has gone");
  check_quota(addresses.size());
  check_not_recalled(addresses);
  host_.blocks().lend_active(addresses, {incarnation_, 0});
  try {
    add_lent(addresses);
  } catch (...) {
    host_.blocks().release(addresses);
    throw;
  }
  promised_ += static_cast<std::uint32_t>(addresses.size());
}

// All, or none and std::bad_alloc. REQUIRES: mutex_ is held.
void Receiver::add_lent(std::span<const Address> addresses) {
  std::size_t added = 0;
  try {
    for (; added < addresses.size(); ++added) lent_.emplace(addresses[added], Lent::kHeld);
  } catch (...) {
    for (const Address address : addresses.first(added)) lent_.erase(address);
    throw;
  }
}

// Throws kNotOwner unless the peer holds each, and each stands there once; then nothing has changed. REQUIRES: mutex_
// is held.
void Receiver::mark_leaving(std::span<const Address> addresses) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const auto entry = lent_.find(addresses[i]);
    if (entry != lent_.end() && entry->second == Lent::kHeld) {
      entry->second = Lent::kLeaving;
      continue;
    }
    mark_held(addresses.first(i));
    throw Error(ErrorCode::kNotOwner,
                "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) + ") is not lent to you",
                {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
}

// REQUIRES: mutex_ is held.
void Receiver::mark_held(std::span<const Address> addresses) noexcept {
  for (const Address address : addresses) lent_.find(address)->second = Lent::kHeld;
}

// Throws as mark_leaving(), but passes over blocks of this pool that the peer does not hold. A recall may have taken
// them back while the return was on its way: the borrower has let go of the whole list, so the others must not stay
// lent. No record tells those from blocks that were never lent to the peer. Returns how many stand in `held`, which has
// room for all. REQUIRES: mutex_ is held.
std::size_t Receiver::mark_returned(std::span<const Address> addresses, std::span<Address> held) {
  std::size_t n = 0;
  for (const Address address : addresses) {
    const auto entry = lent_.find(address);
    const bool ours = is_medium(medium_bits_of(address)) && instance_of(address) == host_.blocks().instance();
    if (entry == lent_.end() && ours) continue;
    if (entry == lent_.end() || entry->second != Lent::kHeld) {
      mark_held(held.first(n));
      mark_leaving(addresses);  // throws
    }
    entry->second = Lent::kLeaving;
    held[n++] = address;
  }
  return n;
}

// A pass that was announced behind the return may have been admitted to the blocks before the return is handled: then
// they are free behind it.
void Receiver::on_return(const CallPointer& call, const std::vector<Address>& addresses) {
  std::vector<Address> held;
  const auto refused = failure_of([&] {
    held.resize(addresses.size());
    QuarantineRoom room;
    const std::lock_guard lock(mutex_);
    if (placements_.is_placed_now(addresses)) {
      room = quarantine_room(kReturnBits | ++returns_, {});
      room.mapped().addresses.reserve(addresses.size());
    }
    held.resize(mark_returned(addresses, held));
    for (const Address address : held) lent_.erase(address);
    if (room.empty()) {
      host_.blocks().release(held);
      promised_ -= static_cast<std::uint32_t>(held.size());
      return;
    }
    host_.blocks().quarantine(held);
    room.mapped().addresses.assign(held.begin(), held.end());  // there is room
    room.mapped().being_placed = true;
    quarantined_.insert(std::move(room));
  });
  if (refused) return call->refuse(*refused);
  if (held.size() == addresses.size()) return call->answer({});
  call->refuse(Error(ErrorCode::kNotOwner, std::to_string(addresses.size() - held.size()) + " of the " +
                                               std::to_string(addresses.size()) +
                                               " blocks are not lent to you any more, or never were; the others are "
                                               "given back"));
}

}  // namespace kvpool
