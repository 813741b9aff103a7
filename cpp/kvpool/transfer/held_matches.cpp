#include "kvpool/transfer/held_matches.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kNsPerMs = 1'000'000;
constexpr std::int64_t kRetryAfterUs = 10'000;

// What the peer gets to know of a prompt. An answer has no more blocks than one fetch may ask for.
CachedPrefix find(BlockHost& blocks, const MatchBody& body) {
  const std::size_t tokens_max = kAddressesMax * blocks.layout().block_tokens;
  return blocks.match(body.name_space, body.tokens.first(std::min(body.tokens.size(), tokens_max)));
}

}  // namespace

// Quick enough for the thread that reads the link: it takes no memory of the pool, and moves nothing.
void HeldMatches::on_match(ServedCall& call, const MatchBody& body) {
  CachedPrefix found = find(host_.blocks(), body);
  const std::int64_t hold_ms =
      std::min<std::int64_t>(body.hold_ms, std::max<std::int64_t>(host_.limits().reserve_max_ns / kNsPerMs, 1));
  MatchedBody answer{static_cast<std::uint32_t>(hold_ms), std::move(found.addresses)};
  Bytes bytes = write_body(answer);  // what can fail comes before the hold
  if (!answer.addresses.empty()) {
    const std::int64_t deadline_ns = host_.now_ns() + hold_ms * kNsPerMs;
    add(call.id(), {std::move(found.hold), answer.addresses.size(), deadline_ns});
    try {
      host_.tick_by(deadline_ns);  // behind it: a tick that comes now must see the hold
    } catch (...) {
      end(call.id());
      throw;
    }
  }
  call.answer(std::move(bytes));
}

void HeldMatches::add(std::uint64_t id, Held&& held) {
  const SessionLimits& limits = host_.limits();
  const std::lock_guard lock(mutex_);
  if (lost_) throw Error(ErrorCode::kPeerLost, "the link has ended");
  if (held_.size() >= limits.transfers_max) {
    throw Error(ErrorCode::kBusy, std::to_string(held_.size()) + " matches of this peer are held here",
                {{"limit", limits.transfers_max}, {"retry_after_us", kRetryAfterUs}});
  }
  if (blocks_ + held.blocks > limits.matched_max) {
    throw Error(ErrorCode::kBusy,
                std::to_string(blocks_) + " blocks are held here by matches of this peer, and " +
                    std::to_string(held.blocks) + " more would exceed its limit of " +
                    std::to_string(limits.matched_max),
                {{"requested", static_cast<std::int64_t>(held.blocks)},
                 {"limit", limits.matched_max},
                 {"retry_after_us", kRetryAfterUs}});
  }
  const std::size_t blocks = held.blocks;
  if (!held_.try_emplace(id, std::move(held)).second) {
    throw Error(ErrorCode::kProtocol, "match " + std::to_string(id) + " is held already");
  }
  blocks_ += blocks;
}

void HeldMatches::on_unmatch(ServedCall& call) {
  end(call.id());
  call.answer({});
}

void HeldMatches::end(std::uint64_t id) noexcept {
  std::shared_ptr<void> ended;  // unpinned without the lock
  const std::lock_guard lock(mutex_);
  const auto entry = held_.find(id);
  if (entry == held_.end()) return;
  blocks_ -= entry->second.blocks;
  ended = std::move(entry->second.hold);
  held_.erase(entry);
}

std::int64_t HeldMatches::tick(std::int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  std::int64_t next = kNever;
  std::erase_if(held_, [&](const auto& entry) {
    const Held& held = entry.second;
    if (held.deadline_ns > now_ns) {
      next = std::min(next, held.deadline_ns);
      return false;
    }
    blocks_ -= held.blocks;
    return true;
  });
  return next;
}

void HeldMatches::on_lost() noexcept {
  std::unordered_map<std::uint64_t, Held> ended;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  lost_ = true;
  blocks_ = 0;
  ended.swap(held_);
}

MatchCounts HeldMatches::counts() const {
  const std::lock_guard lock(mutex_);
  return {held_.size(), blocks_};
}

}  // namespace kvpool
