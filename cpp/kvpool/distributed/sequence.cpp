#include "kvpool/distributed/sequence.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/distributed/sequence_places.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"

namespace kvpool {

// Blocks that peers hold for nothing after a change, which the peers are told when no snapshot from before it is left.
// Snapshots from before an earlier change are from before this one, too: so each keeps the next.
class Sequence::Removals {
 public:
  Removals() = default;
  ~Removals() {
    for (const Place& place : places) place.view->remove(place.blocks);
  }
  Removals(const Removals&) = delete;
  Removals& operator=(const Removals&) = delete;

  Places places;
  std::shared_ptr<Removals> next;
};

Sequence::Sequence(PeerNode& node, std::span<const Address> addresses, std::optional<std::uint64_t> tokens,
                   const Waiting& waiting)
    : node_(node), block_tokens_(node.pool().layout().block_tokens), made_in_(fork_generation()) {
  node.pool().guard();
  SequenceBlocks::check_pool(node.pool());
  here_ = std::make_shared<SequenceBlocks>(node.pool(), SequenceBlocks::kApplication,
                                           node.attender().gpu_kernel().has_value());
  removals_ = std::make_shared<Removals>();
  append(addresses, tokens.value_or(addresses.size() * std::uint64_t{block_tokens_}), waiting);
}

class Sequence::Turn {
 public:
  // Throws kDeadline, kCancelled.
  Turn(Sequence& sequence, bool Sequence::* taken, const Waiting& waiting) : sequence_(sequence), taken_(taken) {
    std::unique_lock lock(sequence.mutex_);
    while (sequence.*taken) {
      const std::int64_t now_ns = monotonic_ns();
      if (now_ns >= waiting.until_ns) throw Error(ErrorCode::kDeadline, "another change of the sequence took too long");
      waiting.check();
      sequence.turn_ended_.wait_for(lock, std::chrono::nanoseconds(waiting.slice_ns(now_ns) - now_ns));
    }
    sequence.*taken = true;
  }
  ~Turn() {
    const std::lock_guard lock(sequence_.mutex_);
    sequence_.*taken_ = false;
    sequence_.turn_ended_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Sequence& sequence_;
  bool Sequence::* const taken_;
};

void Sequence::append(std::span<const Address> addresses, std::optional<std::uint64_t> tokens, const Waiting& waiting) {
  const Turn turn(*this, &Sequence::appending_, waiting);
  Change change{{}, addresses};
  change.tokens = tokens;
  {
    const std::lock_guard lock(mutex_);
    check_open();
    change.blocks = blocks_from(addresses_.size(), addresses.size());
    check_tokens(tokens.value_or(tokens_), addresses_.size() + addresses.size());
  }
  put(change, waiting);
}

std::vector<Address> Sequence::replace(std::uint64_t first, std::span<const Address> addresses,
                                       const Waiting& waiting) {
  const Turn turn(*this, &Sequence::replacing_, waiting);
  {
    const std::lock_guard lock(mutex_);
    check_open();
    const std::size_t blocks = addresses_.size();
    if (first > blocks || addresses.size() > blocks - first) {
      throw Error(ErrorCode::kArgument,
                  "blocks [" + std::to_string(first) + ", " + std::to_string(first + addresses.size()) +
                      ") of a sequence of " + std::to_string(blocks) + " blocks",
                  {{"block", static_cast<std::int64_t>(first)}, {"blocks", static_cast<std::int64_t>(blocks)}});
    }
  }
  return put({blocks_from(first, addresses.size()), addresses}, waiting);
}

void Sequence::switch_blocks(std::span<const std::uint64_t> blocks, std::span<const Address> old,
                             std::span<const Address> addresses, std::uint64_t copied_at, const Waiting& waiting) {
  const Turn turn(*this, &Sequence::replacing_, waiting);
  const Change change{{blocks.begin(), blocks.end()}, addresses, old, copied_at};
  if (old.size() != blocks.size() || addresses.size() != blocks.size() ||
      std::ranges::adjacent_find(change.blocks, std::greater_equal<>()) != change.blocks.end()) {
    throw Error(ErrorCode::kArgument, "blocks must ascend, with an old and a new address each");
  }
  {
    const std::lock_guard lock(mutex_);
    check_open();
    check_unchanged(change);
  }
  put(change, waiting);
}

// REQUIRES: mutex_ is held.
void Sequence::check_unchanged(const Change& change) const {
  if (change.copied_at == UINT64_MAX) return;
  const auto low = std::ranges::upper_bound(set_backs_, change.copied_at, {}, &SetBack::number);
  const std::uint64_t written_from = low == set_backs_.end() ? tokens_ : std::min(tokens_, low->tokens);
  for (std::size_t i = 0; i < change.blocks.size(); ++i) {
    const std::uint64_t block = change.blocks[i];
    if (block < addresses_.size() && addresses_[block] == change.old[i] && block < written_from / block_tokens_)
      continue;
    throw Error(ErrorCode::kState,
                "block " + std::to_string(block) + " of the sequence was replaced or written while it was being copied",
                {{"block", static_cast<std::int64_t>(block)}});
  }
}

// First the peers hold their blocks, then all of it changes at once, then peers hold the old ones no longer.
// REQUIRES: it is the turn of this kind of change; the blocks follow those of the sequence, or are among them.
std::vector<Address> Sequence::put(const Change& change, const Waiting& waiting) {
  const std::vector<BlockRange> changed = ranges_of(change.blocks);
  std::vector<Address> old;
  auto next = std::make_shared<Removals>();
  const Places added = place_all(change, changed, waiting);
  std::shared_ptr<Removals> last;  // destroyed without the lock
  try {
    const std::lock_guard lock(mutex_);
    check_open();
    check_unchanged(change);
    const std::size_t size = std::max<std::size_t>(addresses_.size(), changed.empty() ? 0 : changed.back().end());
    check_tokens(change.tokens.value_or(tokens_), size);
    for (const std::uint64_t block : change.blocks) {
      if (block < addresses_.size()) old.push_back(addresses_[block]);
    }
    Places places = exchanged(places_, changed, added);
    Places gone = parts_at_peers(places_, changed);
    std::vector<SequenceBlocks::Added> here;
    std::size_t at = 0;  // of the first address of a place
    for (const Place& place : added) {
      if (place.view == nullptr) {
        here.push_back({place.blocks.first, change.addresses.subspan(at, place.blocks.count)});
      }
      at += place.blocks.count;
    }
    addresses_.reserve(size);
    here_->exchange(changed, here);  // nothing fails behind this
    places_ = std::move(places);
    if (!gone.empty()) {
      removals_->places = std::move(gone);
      removals_->next = next;
      last = std::exchange(removals_, std::move(next));
    }
    addresses_.resize(size);
    for (std::size_t i = 0; i < change.blocks.size(); ++i) addresses_[change.blocks[i]] = change.addresses[i];
    tokens_ = change.tokens.value_or(tokens_);
  } catch (...) {
    for (const Place& place : added) {
      if (place.view != nullptr) place.view->remove(place.blocks);
    }
    throw;
  }
  return old;
}

// The places of new blocks, in the order of their addresses. Peers hold theirs when this returns, and do not if it
// throws.
std::vector<Sequence::Place> Sequence::place_all(const Change& change, const std::vector<BlockRange>& runs,
                                                 const Waiting& waiting) {
  Service* const peers = node_.service();
  const std::uint32_t own = node_.pool().instance();
  const auto owner = [&](Address address) {
    const std::uint32_t instance = instance_of(address);
    return peers == nullptr || instance == own ? 0 : instance;  // without peers, what is not of this pool is refused
  };
  Places places;
  std::span<const Address> left = change.addresses;
  try {
    for (BlockRange run : runs) {
      while (run.count > 0) {
        const std::uint32_t instance = owner(left.front());
        const auto end =
            std::ranges::find_if(left.first(run.count), [&](Address one) { return owner(one) != instance; });
        const auto some = left.first(static_cast<std::size_t>(end - left.begin()));
        const BlockRange blocks{run.first, some.size()};
        left = left.subspan(some.size());
        run = {blocks.end(), run.count - blocks.count};
        places.reserve(places.size() + 1);
        if (instance == 0) {
          places.push_back({blocks, nullptr});
          continue;
        }
        const auto session = peers->reach_owner({some.begin(), some.end()}, waiting);
        const auto known = std::ranges::find_if(places, [&](const Place& place) {
          return place.view != nullptr && place.view->session_pointer() == session;
        });
        auto view = known != places.end() ? known->view : view_for(session, runs);
        view->add(blocks.first, some, waiting);
        places.push_back({blocks, std::move(view)});
      }
    }
  } catch (...) {
    for (const Place& place : places) {
      if (place.view != nullptr) place.view->remove(place.blocks);
    }
    throw;
  }
  return places;
}

// A view of the sequence at this peer that has none of these blocks; or a new one.
std::shared_ptr<RemoteView> Sequence::view_for(const std::shared_ptr<Session>& session,
                                               const std::vector<BlockRange>& blocks) const {
  const std::lock_guard lock(mutex_);
  for (const Place& candidate : places_) {
    if (candidate.view == nullptr || candidate.view->session_pointer() != session) continue;
    // Also one whose blocks are about to be replaced, or were recalled: what takes their place must not go with them,
    // or be read before the peer holds it.
    const auto is_there = [&](const Place& place) {
      return place.view == candidate.view && std::ranges::any_of(blocks, [&](const BlockRange& range) {
               return overlap(place.blocks, range).count > 0;
             });
    };
    if (std::ranges::any_of(places_, is_there)) continue;
    const auto has_any = [&](const BlockRange& range) { return candidate.view->has_any(range); };
    if (std::ranges::none_of(blocks, has_any)) return candidate.view;
  }
  return RemoteView::open(session);
}

void Sequence::set_tokens(std::uint64_t tokens) {
  const std::lock_guard lock(mutex_);
  check_open();
  check_tokens(tokens, addresses_.size());
  if (tokens < tokens_) {
    const std::uint64_t block = tokens / block_tokens_;  // that is written next
    const auto there = std::ranges::find_if(places_, [&](const Place& place) {
      return place.view != nullptr && overlap(place.blocks, {block, 1}).count > 0;
    });
    if (there != places_.end()) {
      throw Error(ErrorCode::kState,
                  "tokens cannot be set back to " + std::to_string(tokens) + ": block " + std::to_string(block) +
                      " lies with peer " + there->view->session().peer().name + ", and could not be written",
                  {{"block", static_cast<std::int64_t>(block)}});
    }
    std::erase_if(set_backs_, [&](const SetBack& one) { return one.tokens >= tokens; });
    set_backs_.push_back({++set_backs_made_, tokens});
  }
  tokens_ = tokens;
}

std::uint64_t Sequence::set_backs() const {
  const std::lock_guard lock(mutex_);
  return set_backs_made_;
}

void Sequence::close() noexcept {
  if (made_in_ != fork_generation()) return;  // a lock may be held by a thread that is not in this process
  Places places;                              // destroyed without the lock, as these:
  std::shared_ptr<Removals> last;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  places.swap(places_);
  last.swap(removals_);
  if (here_ != nullptr) here_->close();
}

std::uint64_t Sequence::tokens() const {
  const std::lock_guard lock(mutex_);
  return tokens_;
}

std::vector<Address> Sequence::addresses() const {
  const std::lock_guard lock(mutex_);
  return addresses_;
}

bool Sequence::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

std::vector<TokenRange> Sequence::lost() const {
  const std::lock_guard lock(mutex_);
  std::vector<TokenRange> lost;
  for (const Place& place : places_) {
    if (place.view == nullptr) continue;
    const bool all = place.view->session().told_lost();
    for (const BlockRange& blocks : all ? std::vector{place.blocks} : place.view->missing(place.blocks)) {
      const TokenRange range = tokens_in(blocks, tokens_);
      if (range.tokens() == 0) continue;
      if (!lost.empty() && lost.back().end == range.begin) {
        lost.back().end = range.end;
      } else {
        lost.push_back(range);
      }
    }
  }
  return lost;
}

Sequence::Snapshot Sequence::snapshot() const {
  const std::lock_guard lock(mutex_);
  check_open();
  return {tokens_, places_, here_->read(), removals_};
}

TokenRange Sequence::tokens_in(const BlockRange& blocks, std::uint64_t tokens) const noexcept {
  const std::uint64_t begin = std::min(blocks.first * block_tokens_, tokens);
  return {begin, std::min(blocks.end() * block_tokens_, tokens)};
}

// REQUIRES: mutex_ is held.
void Sequence::check_open() const {
  node_.pool().guard();
  if (closed_) throw Error(ErrorCode::kState, "the sequence is closed");
}

void Sequence::check_tokens(std::uint64_t tokens, std::size_t blocks) const {
  const std::uint64_t capacity = blocks * std::uint64_t{block_tokens_};
  if (tokens <= capacity) return;
  throw Error(ErrorCode::kArgument,
              "a sequence of " + std::to_string(blocks) + " blocks holds " + std::to_string(capacity) +
                  " tokens, and not " + std::to_string(tokens),
              {{"tokens", static_cast<std::int64_t>(tokens)}, {"capacity", static_cast<std::int64_t>(capacity)}});
}

}  // namespace kvpool
