// The steps by which cached blocks change their place: before their bytes are copied, and when these have arrived.
#include <algorithm>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {
namespace {

// Pages come up from there by way of DRAM.
void check_none_on_disk(std::span<const Address> pages) {
  const auto found = std::ranges::find(pages, Medium::kDisk, medium_of);
  if (found == pages.end()) return;
  const auto position = static_cast<std::int64_t>(found - pages.begin());
  throw Error(ErrorCode::kUnsupported,
              "position " + std::to_string(position) + " lies on DISK: bring it to DRAM before you name blocks of HBM",
              {{"position", position}});
}

void check_room_named(std::size_t needed, std::size_t given) {
  if (needed == given) return;
  throw Error(ErrorCode::kArgument,
              std::to_string(needed) + " blocks to swap in, and " + std::to_string(given) + " to swap into",
              {{"needed", static_cast<std::int64_t>(needed)}, {"given", static_cast<std::int64_t>(given)}});
}

}  // namespace

PromptCache::MoveOut PromptCache::begin_move_out(std::size_t n) {
  MoveOut move;
  std::vector<PromptNode*> held;
  n = std::min(n, evictable(Medium::kHbm));
  move.from.reserve(n);
  move.to.resize(n);
  held.reserve(std::min(n, index_.node_count() + 1));
  try {
    while (move.from.size() < n) {
      PromptNode* node = index_.hold_coldest(ValueClass::kHbm, n - move.from.size());
      if (node == nullptr) break;
      held.push_back(node);
      move.from.insert(move.from.end(), node->payload.values.get(), node->payload.values.get() + node->pages);
    }
  } catch (...) {
    for (PromptNode* node : held) index_.release_hold(node);
    throw;
  }
  move.to.resize(move.from.size());
  KVPOOL_CHECK(blocks_.take(move.to.size(), Medium::kDram, BlockState::kReserved, move.to.data()));
  arriving_ += static_cast<std::uint32_t>(move.to.size());
  return move;
}

std::size_t PromptCache::finish_move_out(MoveOut& move, std::vector<Address>* moved) noexcept {
  arriving_ -= static_cast<std::uint32_t>(move.to.size());
  renew(move.to);
  const std::vector<Address>& from = move.from;
  const std::vector<Address>& to = move.to;
  std::size_t gone = 0;
  for (std::size_t i = 0; i < from.size();) {
    PromptNode* node = node_of(from[i]);
    const std::uint32_t pages = node->pages;
    if (node->payload.pins > 0) {
      blocks_.release(&to[i], pages);
    } else {
      if (copies_ != nullptr) [[unlikely]] {
        for (std::uint32_t k = 0; k < pages; ++k) move_copy(from[i + k], to[i + k]);
      }
      index_.redirect(node, &to[i]);
      placed(*node);
      if (copies_ != nullptr) want_moved(*node);
      blocks_.release(&from[i], pages);
      if (moved != nullptr) moved->insert(moved->end(), &to[i], &to[i] + pages);
      gone += pages;
    }
    index_.release_hold(node);
    i += pages;
  }
  counters_.swapped_out_blocks += gone;
  return gone;
}

void PromptCache::cancel_move_out(MoveOut& move) noexcept {
  arriving_ -= static_cast<std::uint32_t>(move.to.size());
  blocks_.release(move.to.data(), move.to.size());
  for (std::size_t i = 0; i < move.from.size();) {
    PromptNode* node = node_of(move.from[i]);
    i += node->pages;
    index_.release_hold(node);
  }
}

// The addresses that reserved blocks have now: the pool may have joined a cluster while they were copied to.
void PromptCache::renew(std::vector<Address>& addresses) const noexcept {
  for (Address& address : addresses) address = blocks_.store_of(address).address_of(block_of(address));
}

void PromptCache::begin_move_in(std::span<const Address> given, std::span<const Address> into, PendingSwapIn& pending) {
  pending.held.reserve(given.size());
  const Pinnable before = pinnable();
  try {
    gather(given, pending);
    check_none_on_disk(pending.addresses);
    check_quotas_since(before, {});
    name_room(into, pending);
  } catch (...) {
    for (const IndexPin& pin : pending.pins) index_.unpin(pin);
    throw;
  }
}

void PromptCache::finish_move_in(PendingSwapIn& pending) {
  check_not_forgotten(pending.addresses);
  redirect(pending);
  const Address* arrived = pending.to.data();
  std::vector<Address>& current = pending.addresses;
  for (Address& address : current) address = medium_of(address) == pending.source ? *arrived++ : address;
  pin_all(pending);
  counters_.swapped_in_blocks += pending.from.size();
  pending.to.clear();  // the index's now
}

// For the caller: a pin on each page that no later page of the list covers.
void PromptCache::pin_all(PendingSwapIn& pending) {
  const std::vector<Address>& pages = pending.addresses;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    PromptNode* node = node_of(pages[i]);
    const PromptNode* next = i + 1 < pages.size() ? node_of(pages[i + 1]) : nullptr;
    const bool covered = next != nullptr && (next == node || next->parent == node);
    if (!covered) pending.held.push_back(index_.pin(node));
  }
}

void PromptCache::cancel_move_in(PendingSwapIn& pending) noexcept {
  for (auto* pins : {&pending.pins, &pending.held}) {
    for (const IndexPin& pin : *pins) index_.unpin(pin);
    pins->clear();
  }
  give_back(pending, 0);
  drop_if_ended();
}

void PromptCache::give_back(PendingSwapIn& pending, std::size_t keep) noexcept {
  const std::span<const Address> rest = std::span(pending.to).subspan(keep);
  if (pending.into_named) {
    for (const Address address : rest) blocks_.set_state(address, BlockState::kActive);
  } else {
    blocks_.release(rest.data(), rest.size());
  }
  pending.to.resize(keep);
}

// Where the page of a historical block lies now. If the block is in limbo, or a copy on DISK, the page was swapped in
// after the holder of this address had matched it, and the block's mark names the new block: perhaps one that is in
// limbo itself by now.
Address PromptCache::page_of(Address address) const noexcept {
  for (;;) {
    const BlockStore& blocks = blocks_.store_of(address);
    const std::uint32_t block = block_of(address);
    if (blocks.tag(block) != CacheBlocks::kCacheTag) return address;
    const std::uint32_t mark = blocks.mark(block);
    address = blocks_.store(medium_of_mark(mark)).address_of(block_of_mark(mark));
  }
}

// Checks the addresses, cuts nodes so that every run of them in the source is a separate node, and pins all their
// nodes.
void PromptCache::gather(std::span<const Address> given, PendingSwapIn& pending) {
  std::vector<Address>& addresses = pending.addresses;
  addresses.assign(given.begin(), given.end());
  const std::uint32_t stamp = ++move_stamp_;  // nobody else marks blocks before this has looked at all of them
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    blocks_.check(addresses[i], i, BlockState::kHistorical);
    blocks_.check_filled(addresses[i], i);
    addresses[i] = page_of(addresses[i]);
    if (store_of(addresses[i]).mark(block_of(addresses[i])) == stamp) {
      throw Error(
          ErrorCode::kArgument,
          "address " + std::to_string(given[i]) + " (position " + std::to_string(i) + ") stands twice in the list",
          {{"address", static_cast<std::int64_t>(given[i])}, {"position", static_cast<std::int64_t>(i)}});
    }
    blocks_.set_mark(addresses[i], stamp);
  }
  check_not_forgotten(addresses);
  pending.pins.reserve(addresses.size());
  pending.from.reserve(addresses.size());
  for (std::size_t i = 0; i < addresses.size();) {
    PromptNode* node = node_of(addresses[i]);
    const Address* values = node->payload.values.get();
    const auto at = static_cast<std::uint32_t>(std::find(values, values + node->pages, addresses[i]) - values);
    std::uint32_t run = 1;  // addresses [i, i + run) are the node's pages [at, at + run)
    while (i + run < addresses.size() && at + run < node->pages && addresses[i + run] == values[at + run]) ++run;
    if (medium_of(addresses[i]) == pending.source) {
      pending.from.insert(pending.from.end(), addresses.begin() + static_cast<std::ptrdiff_t>(i),
                          addresses.begin() + static_cast<std::ptrdiff_t>(i + run));
    }
    pending.pins.push_back(index_.pin(index_.isolate(node, at, run)));
    i += run;
  }
}

// Reserves blocks of the caller's for what is to come, until the copy is committed.
void PromptCache::name_room(std::span<const Address> into, PendingSwapIn& pending) {
  if (blocks_.engine_allocates() && !pending.from.empty()) {
    throw Error(
        ErrorCode::kState,
        "the engine allocates this pool's HBM, and may use its blocks again at any moment: cached blocks cannot "
        "move there, only be copied there by fetch");
  }
  if (into.empty()) {
    if (pending.from.empty()) return;
    if (store(Medium::kHbm).capacity() == 0)
      throw Error(ErrorCode::kState, "swap needs both tiers: this pool has no HBM blocks");
    return;
  }
  check_room_named(pending.from.size(), into.size());
  blocks_.check_active_and_distinct(into.data(), into.size(), /*skip_cached=*/false);
  for (std::size_t i = 0; i < into.size(); ++i) {
    if (medium_bits_of(into[i]) == static_cast<std::uint32_t>(Medium::kHbm)) continue;
    throw Error(ErrorCode::kArgument, "swap_in goes to HBM blocks, and position " + std::to_string(i) + " is in DRAM",
                {{"position", static_cast<std::int64_t>(i)}});
  }
  pending.to.assign(into.begin(), into.end());
  pending.into_named = true;
  // With no owner: what the check above left there as a tag could be some peer's incarnation.
  blocks_.give(into, {BlockState::kReserved, 0, 0});
}

// Where the pages lie now. Nodes have only been cut since: those in the source are whole nodes still.
void PromptCache::find_move_in(PendingSwapIn& pending) noexcept {
  pending.from.clear();
  for (Address& address : pending.addresses) {
    address = page_of(address);
    if (medium_of(address) == pending.source)
      pending.from.push_back(address);  // within the room: there are no more than before
  }
}

// Points the index at the copies. Blocks that others may still read by their old address stay, in limbo, until the last
// pin of that time goes. Throws std::bad_alloc with nothing moved.
void PromptCache::redirect(PendingSwapIn& pending) {
  const std::vector<Address>& from = pending.from;
  // This call's own pins go first, so that what pins are left are others'.
  for (const IndexPin& pin : pending.pins) index_.unpin(pin);
  pending.pins.clear();

  std::vector<Limbo> limbo;
  for (std::size_t i = 0; i < from.size(); i += node_of(from[i])->pages) {
    PromptNode* node = node_of(from[i]);
    if (node->payload.pins > 0) limbo.push_back({node, 0, node->payload.pins, {&from[i], &from[i] + node->pages}});
  }
  limbo_.reserve(limbo_.size() + limbo.size());

  // From here on nothing throws.
  renew(pending.to);
  auto next_limbo = limbo.begin();
  for (std::size_t i = 0; i < from.size();) {
    PromptNode* node = node_of(from[i]);
    const std::uint32_t pages = node->pages;
    if (copies_ != nullptr) [[unlikely]] {
      for (std::uint32_t k = 0; k < pages; ++k) move_copy(from[i + k], pending.to[i + k]);
    }
    index_.redirect(node, &pending.to[i]);
    placed(*node);
    if (node->payload.pins > 0) {
      node->payload.has_limbo = true;
      next_limbo->stamp = index_.tick();
      for (std::uint32_t k = 0; k < pages; ++k) {
        blocks_.set_tag(from[i + k], CacheBlocks::kCacheTag);
        blocks_.set_mark(from[i + k], mark_naming(pending.to[i + k]));
      }
      limbo_.push_back(std::move(*next_limbo++));
    } else {
      blocks_.release(&from[i], pages);
    }
    i += pages;
  }
}

void PromptCache::unpinned(PromptNode& node, std::uint64_t stamp) noexcept {
  bool more = false;
  for (std::size_t i = 0; i < limbo_.size();) {
    Limbo& limbo = limbo_[i];
    if (limbo.node == &node && stamp < limbo.stamp && --limbo.remaining == 0) {
      blocks_.release(limbo.blocks.data(), limbo.blocks.size());
      if (i + 1 < limbo_.size()) limbo = std::move(limbo_.back());
      limbo_.pop_back();
      continue;
    }
    more = more || limbo.node == &node;
    ++i;
  }
  node.payload.has_limbo = more;
}

}  // namespace kvpool
