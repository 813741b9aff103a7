#include "kvpool/distributed/sequence.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

using Places = std::vector<Sequence::Place>;

BlockRange overlap(const BlockRange& a, const BlockRange& b) noexcept {
  const std::uint64_t first = std::max(a.first, b.first);
  const std::uint64_t end = std::min(a.end(), b.end());
  return {first, end > first ? end - first : 0};
}

// Neighbours that lie in one pool, and are held by one view, are one place.
void add_place(Places& places, Sequence::Place place) {
  if (place.blocks.count == 0) return;
  if (!places.empty() && places.back().view == place.view && places.back().blocks.end() == place.blocks.first) {
    places.back().blocks.count += place.blocks.count;
  } else {
    places.push_back(std::move(place));
  }
}

// `places` with those of `added`, which are all of the blocks `changed`, in the place of what was there.
Places exchanged(const Places& places, const BlockRange& changed, const Places& added) {
  Places result;
  const auto add_parts = [&](std::uint64_t begin, std::uint64_t end) {
    for (const Sequence::Place& place : places) {
      add_place(result, {overlap(place.blocks, {begin, end - begin}), place.view});
    }
  };
  add_parts(0, changed.first);
  for (const Sequence::Place& place : added) add_place(result, place);
  add_parts(changed.end(), std::max(changed.end(), places.empty() ? 0 : places.back().blocks.end()));
  return result;
}

}  // namespace

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
    : node_(node), block_tokens_(node.pool().layout().block_tokens) {
  node.pool().guard();
  SequenceBlocks::check_pool(node.pool());
  here_ = std::make_shared<SequenceBlocks>(node.pool(), SequenceBlocks::kApplication);
  removals_ = std::make_shared<Removals>();
  append(addresses, tokens.value_or(addresses.size() * std::uint64_t{block_tokens_}), waiting);
}

void Sequence::append(std::span<const Address> addresses, std::optional<std::uint64_t> tokens, const Waiting& waiting) {
  const std::lock_guard changing(changing_);
  std::uint64_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    check_open();
    first = addresses_.size();
    check_tokens(tokens.value_or(tokens_), first + addresses.size());
  }
  put(first, addresses, tokens, waiting);
}

std::vector<Address> Sequence::replace(std::uint64_t first, std::span<const Address> addresses,
                                       const Waiting& waiting) {
  const std::lock_guard changing(changing_);
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
  return put(first, addresses, std::nullopt, waiting);
}

// First the peers hold their blocks, then all of it changes at once, then peers hold the old ones no longer.
// REQUIRES: changing_ is held; blocks [first, first + n) follow or are those of the sequence.
std::vector<Address> Sequence::put(std::uint64_t first, std::span<const Address> addresses,
                                   std::optional<std::uint64_t> tokens, const Waiting& waiting) {
  const BlockRange changed{first, addresses.size()};
  std::vector<Address> old;
  auto next = std::make_shared<Removals>();
  const Places added = place_all(first, addresses, waiting);
  std::shared_ptr<Removals> last;  // destroyed without the lock
  try {
    const std::lock_guard lock(mutex_);
    check_open();
    check_tokens(tokens.value_or(tokens_), std::max<std::size_t>(changed.end(), addresses_.size()));
    const auto begin = addresses_.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = begin + static_cast<std::ptrdiff_t>(std::min(addresses.size(), addresses_.size() - first));
    old.assign(begin, end);
    Places places = exchanged(places_, changed, added);
    Places gone;
    for (const Place& place : places_) {
      const BlockRange blocks = overlap(place.blocks, changed);
      if (place.view != nullptr && blocks.count > 0) gone.push_back({blocks, place.view});
    }
    addresses_.reserve(changed.end());
    exchange_here(first, addresses, added);  // nothing fails behind this
    places_ = std::move(places);
    if (!gone.empty()) {
      removals_->places = std::move(gone);
      removals_->next = next;
      last = std::exchange(removals_, std::move(next));
    }
    addresses_.resize(std::max<std::size_t>(addresses_.size(), changed.end()));
    std::ranges::copy(addresses, addresses_.begin() + static_cast<std::ptrdiff_t>(first));
    tokens_ = tokens.value_or(tokens_);
  } catch (...) {
    for (const Place& place : added) {
      if (place.view != nullptr) place.view->remove(place.blocks);
    }
    throw;
  }
  return old;
}

// The places of new blocks. Peers hold theirs when this returns, and do not if it throws.
std::vector<Sequence::Place> Sequence::place_all(std::uint64_t first, std::span<const Address> addresses,
                                                 const Waiting& waiting) {
  Service* const peers = node_.service();
  const std::uint32_t own = node_.pool().instance();
  const auto owner = [&](Address address) {
    const std::uint32_t instance = instance_of(address);
    return peers == nullptr || instance == own ? 0 : instance;  // without peers, what is not of this pool is refused
  };
  Places places;
  try {
    for (std::size_t begin = 0; begin < addresses.size();) {
      std::size_t end = begin + 1;
      while (end < addresses.size() && owner(addresses[end]) == owner(addresses[begin])) ++end;
      const BlockRange blocks{first + begin, end - begin};
      const auto some = addresses.subspan(begin, end - begin);
      begin = end;
      if (owner(some.front()) == 0) {
        add_place(places, {blocks, nullptr});
        continue;
      }
      const auto session = peers->reach_owner({some.begin(), some.end()}, waiting);
      auto view = std::ranges::find_if(places, [&](const Place& place) {
        return place.view != nullptr && place.view->session_pointer() == session;
      });
      Place place{blocks, view != places.end() ? view->view : view_for(session, {first, addresses.size()})};
      places.reserve(places.size() + 1);
      place.view->add(blocks.first, some, waiting);
      places.push_back(std::move(place));
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
                                               const BlockRange& blocks) const {
  const std::lock_guard lock(mutex_);
  for (const Place& candidate : places_) {
    if (candidate.view == nullptr || candidate.view->session_pointer() != session) continue;
    if (!candidate.view->has_any(blocks)) return candidate.view;
  }
  return RemoteView::open(session);
}

// REQUIRES: mutex_ is held.
void Sequence::exchange_here(std::uint64_t first, std::span<const Address> addresses, const Places& added) {
  std::vector<SequenceBlocks::Added> here;
  for (const Place& place : added) {
    if (place.view != nullptr) continue;
    here.push_back({place.blocks.first, addresses.subspan(place.blocks.first - first, place.blocks.count)});
  }
  here_->exchange({first, addresses.size()}, here);
}

void Sequence::set_tokens(std::uint64_t tokens) {
  const std::lock_guard lock(mutex_);
  check_open();
  check_tokens(tokens, addresses_.size());
  tokens_ = tokens;
}

void Sequence::close() noexcept {
  Places places;  // destroyed without the lock, as these:
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
    if (place.view == nullptr || !place.view->session().lost()) continue;
    const TokenRange range = tokens_in(place.blocks, tokens_);
    if (range.tokens() == 0) continue;
    if (!lost.empty() && lost.back().end == range.begin) {
      lost.back().end = range.end;
    } else {
      lost.push_back(range);
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
