// Lent blocks that are taken back before their borrower returns them.
//
// What this process places is free at once, behind the frame that is being placed in it: what comes later finds a block
// that is not lent. What the peer writes by itself is in quarantine until it has said that it does so no more, or is
// proved to be gone.
#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "kvpool/transfer/receiver.h"
#include "kvpool/transfer/transfer_id.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 10'000;

}  // namespace

void Receiver::check_lent(std::span<const Address> addresses) const {
  std::unordered_set<Address> seen;
  seen.reserve(addresses.size());
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const auto fail = [&](ErrorCode code, const std::string& what) {
      throw Error(code, "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) + ") " + what,
                  {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
    };
    if (!seen.insert(addresses[i]).second) fail(ErrorCode::kArgument, "stands twice in the list");
    if (lost_ || !lent_.contains(addresses[i])) fail(ErrorCode::kNotOwner, "is not lent to peer " + peer_);
  }
}

std::vector<Address> Receiver::some_lent(std::size_t most) const {
  std::vector<Address> some;
  const std::lock_guard lock(mutex_);
  some.reserve(std::min(most, lent_.size()));
  for (const auto& [address, state] : lent_) {
    if (some.size() == most || lost_) break;
    if (state == Lent::kHeld) some.push_back(address);
  }
  return some;
}

void Receiver::expect_recall(std::uint64_t id, std::span<const Address> addresses) {
  Recall recall;
  recall.addresses.assign(addresses.begin(), addresses.end());
  const std::lock_guard lock(mutex_);
  recalls_.emplace(id, std::move(recall));
}

// REQUIRES: mutex_ is held.
void Receiver::check_not_recalled(std::span<const Address> addresses) const {
  if (recalls_.empty()) return;
  const std::unordered_set<Address> lent(addresses.begin(), addresses.end());
  for (const auto& [id, recall] : recalls_) {
    const auto found = std::ranges::find_if(recall.addresses, [&](Address address) { return lent.contains(address); });
    if (found == recall.addresses.end()) continue;
    throw Error(ErrorCode::kBusy,
                "peer " + peer_ + " has not answered yet that it has let go of address " + std::to_string(*found),
                {{"address", static_cast<std::int64_t>(*found)}, {"retry_after_us", kRetryAfterUs}});
  }
}

void Receiver::forget_recall(std::uint64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  recalls_.erase(id);
}

RecallResult Receiver::end_recall(QuarantineRoom&& room, std::vector<Address>& addresses, bool writer_ended) noexcept {
  RecallResult result;
  std::vector<Address>& taken = room.mapped().addresses;
  const std::lock_guard lock(mutex_);
  if (const auto recall = recalls_.find(room.key() & ~kRecallBit); recall != recalls_.end()) {
    writer_ended = writer_ended || recall->second.answered;
    recall->second.is_over = true;
    if (writer_ended) recalls_.erase(recall);
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < addresses.size() && !lost_; ++i) {
    const Address address = addresses[i];
    const auto entry = lent_.find(address);
    if (entry != lent_.end() && entry->second == Lent::kHeld) {
      taken.push_back(address);  // there is room
      addresses[kept++] = address;
      lent_.erase(entry);
      continue;
    }
    if (entry != lent_.end()) entry->second = Lent::kRecalled;
    ++result.returned;
  }
  addresses.resize(kept);
  if (taken.empty()) return result;  // also when the link has ended: what was lent is free, or in quarantine
  const auto count = static_cast<std::uint32_t>(taken.size());
  const bool quiet = writer_ended || drained_ ||
                     std::ranges::none_of(taken, [&](Address address) { return writes_directly(address); });
  room.mapped().being_placed = quiet && placements_.is_placed_now(taken);
  if (quiet && !room.mapped().being_placed) {
    host_.blocks().release(taken);
    promised_ -= count;
    result.freed = count;
    return result;
  }
  host_.blocks().quarantine(taken);
  quarantined_.insert(std::move(room));
  result.quarantined = count;
  return result;
}

// Between the deadline and end_recall(), another thread may bring the answer: then that frees the blocks.
void Receiver::on_recall_over(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (const auto recall = recalls_.find(id); recall != recalls_.end()) {
    recall->second.answered = true;
    if (recall->second.is_over) recalls_.erase(recall);
  }
  release_quarantined(id | kRecallBit);
}

}  // namespace kvpool
