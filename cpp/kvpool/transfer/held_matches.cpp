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
// Of one question: a look-up of so many takes about a millisecond of the link's thread and of the cache's lock.
constexpr std::size_t kKeysMax = 8192;

// What the peer gets to know of a prompt. An answer has no more blocks than one fetch may ask for.
CachedPrefix find(BlockHost& blocks, const MatchBody& body) {
  const std::size_t tokens_max = kAddressesMax * blocks.layout().block_tokens;
  return blocks.match(body.name_space, body.tokens.first(std::min(body.tokens.size(), tokens_max)));
}

}  // namespace

// Quick enough for the thread that reads the link: it takes no memory of the pool, and moves nothing.
void HeldMatches::on_match(ServedCall& call, const MatchBody& body) {
  CachedPrefix found = find(host_.blocks(), body);
  const std::size_t blocks = found.addresses.size();
  const MatchedBody matched{hold_ms(body.hold_ms), std::move(found.addresses)};
  answer(call, write_body(matched), matched.hold_ms, std::move(found.hold), blocks);
}

// As quick: kKeysMax bounds how many keys are looked up.
void HeldMatches::on_match_keys(ServedCall& call, const MatchKeysBody& body) {
  const std::size_t keys = body.keys.size() / body.key_bytes;
  if (keys > kKeysMax) {
    throw Error(ErrorCode::kArgument,
                std::to_string(keys) + " keys in one question, which takes at most " + std::to_string(kKeysMax),
                {{"given", static_cast<std::int64_t>(keys)}, {"maximum", static_cast<std::int64_t>(kKeysMax)}});
  }
  StoredKeys stored = host_.blocks().match_keys(body.cache, body.key_bytes, body.keys, body.every);
  const std::size_t blocks = stored.addresses.size();
  const MatchedKeysBody matched{hold_ms(body.hold_ms), std::move(stored.found), std::move(stored.addresses)};
  answer(call, write_body(matched), matched.hold_ms, std::move(stored.hold), blocks);
}

// How long a peer gets a hold that wants it for so long.
std::uint32_t HeldMatches::hold_ms(std::uint32_t wanted) const noexcept {
  const std::int64_t most = std::max<std::int64_t>(host_.limits().reserve_max_ns / kNsPerMs, 1);
  return static_cast<std::uint32_t>(std::min<std::int64_t>(wanted, most));
}

// What can fail comes before the hold.
void HeldMatches::answer(ServedCall& call, Bytes&& bytes, std::uint32_t hold_ms, std::shared_ptr<void>&& hold,
                         std::size_t blocks) {
  if (blocks > 0) {
    const std::int64_t deadline_ns = host_.now_ns() + hold_ms * kNsPerMs;
    add(call.id(), {std::move(hold), blocks, deadline_ns});
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
