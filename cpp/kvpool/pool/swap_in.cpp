// Moves of cached blocks from DRAM to HBM.
//
// In three steps: under the lock the arguments are checked and what they name is pinned; then, one swap in at a time,
// blocks are reserved and the bytes copied; under the lock again the index is pointed at the copies, and the pages are
// pinned for the caller. Evictions and swaps out go on beside the second step, for they take nothing that is pinned;
// only room is made as one of them, under reclaim_. A thread of the pool reserves the blocks before its turn, for it
// may have to wait for the GPU to leave them, and nobody else is to wait with it.
//
// Between the first and the second step another swap in may have brought some of the pages (find_swap_in).
//
// Invariant
//   A3  What a swap in is to bring is pinned from its checks to its end. Each page lies where it lay then, in a node
//       that has been cut at most, or another swap in has brought it: then the old block is in limbo, and its mark
//       says where the page lies now.
#include <algorithm>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/swap_handle.h"

namespace kvpool {
namespace {

bool in_dram(Address address) noexcept { return medium_bits_of(address) == static_cast<std::uint32_t>(Medium::kDram); }

void check_room_named(std::size_t needed, std::size_t given) {
  if (needed == given) return;
  throw Error(ErrorCode::kArgument,
              std::to_string(needed) + " blocks to swap in, and " + std::to_string(given) + " to swap into",
              {{"needed", static_cast<std::int64_t>(needed)}, {"given", static_cast<std::int64_t>(given)}});
}

}  // namespace

std::vector<IndexPin> Pool::swap_in(std::span<const Address> addresses, std::span<const Address> into, Address* out,
                                    const CallerStream& after) {
  guard();
  check_stream(after);
  PendingSwapIn pending;
  begin_swap_in(addresses, into, pending);
  finish_swap_in(pending, after);
  std::copy(pending.addresses.begin(), pending.addresses.end(), out);
  return std::move(pending.held);
}

// Checks everything, pins what is to come, and reserves `into`. Throws with nothing of that left.
void Pool::begin_swap_in(std::span<const Address> given, std::span<const Address> into, PendingSwapIn& pending) {
  pending.held.reserve(given.size());
  const std::lock_guard lock(mutex_);
  guard();
  try {
    gather_swap_in(given, pending);
    name_swap_in(into, pending);
  } catch (...) {
    for (const IndexPin& pin : pending.pins) index_->unpin(pin);
    throw;
  }
}

// Brings them. Whatever it throws, it has given back what begin_swap_in took. When it is the audit that throws, the
// pages have moved, and nobody has pins on them.
void Pool::finish_swap_in(PendingSwapIn& pending, const MoveOrder& order) {
  try {
    if (order.swap() != nullptr) prepare_swap_in(pending, order);
    const std::lock_guard one_at_a_time(swap_in_mutex_);
    Lock lock(mutex_);
    guard();
    find_swap_in(pending);
    reserve_swap_in(lock, pending, order);
    if (order.swap() != nullptr) order.swap()->begin();
    if (!pending.from.empty()) copy_swap_in(lock, pending, order);
    commit_swap_in(pending);
    const Address* arrived = pending.to.data();
    std::vector<Address>& current = pending.addresses;
    for (Address& address : current) address = in_dram(address) ? *arrived++ : address;
    for (std::size_t i = 0; i < current.size(); ++i) {
      PromptNode* node = node_of(current[i]);
      const PromptNode* next = i + 1 < current.size() ? node_of(current[i + 1]) : nullptr;
      const bool covered = next != nullptr && (next == node || next->parent == node);
      if (!covered) pending.held.push_back(index_->pin(node));
    }
    counters_.swapped_in_blocks += pending.from.size();
    pending.to.clear();  // the index's now, whatever the audit says
    audit_if_asked();
  } catch (...) {
    abandon_swap_in(pending);
    throw;
  }
}

// Gives back what was taken for it. Also of a pool that is closed.
void Pool::abandon_swap_in(PendingSwapIn& pending) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto* pins : {&pending.pins, &pending.held}) {
    for (const IndexPin& pin : *pins) index_->unpin(pin);
    pins->clear();
  }
  give_back_swap_in(pending, 0);
}

// Of the blocks to swap into all but the first `keep`: to the caller, when it named them.
void Pool::give_back_swap_in(PendingSwapIn& pending, std::size_t keep) noexcept {
  const std::span<const Address> rest = std::span(pending.to).subspan(keep);
  if (pending.into_named) {
    for (const Address address : rest) store_of(address).set_state(block_of(address), BlockState::kActive);
  } else {
    space_.release(rest.data(), rest.size());
  }
  pending.to.resize(keep);
}

// Where a page lies whose block is historical. In limbo: somebody swapped it in after whoever has this address had
// matched it, and its mark says where to.
Address Pool::page_of(Address address) noexcept {
  const BlockStore& blocks = store_of(address);
  const std::uint32_t block = block_of(address);
  return blocks.tag(block) == BlockSpace::kCacheTag ? store(Medium::kHbm).address_of(blocks.mark(block)) : address;
}

// Checks the addresses, makes every run of them that lies in DRAM a node of its own, and pins all their nodes.
void Pool::gather_swap_in(std::span<const Address> given, PendingSwapIn& pending) {
  std::vector<Address>& addresses = pending.addresses;
  addresses.assign(given.begin(), given.end());
  const std::uint32_t stamp = ++move_stamp_;  // nobody else marks blocks before this has looked at all of them
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    space_.check(addresses[i], i, BlockState::kHistorical);
    addresses[i] = page_of(addresses[i]);
    BlockStore& blocks = store_of(addresses[i]);
    const std::uint32_t block = block_of(addresses[i]);
    if (blocks.mark(block) == stamp) {
      throw Error(
          ErrorCode::kArgument,
          "address " + std::to_string(given[i]) + " (position " + std::to_string(i) + ") stands twice in the list",
          {{"address", static_cast<std::int64_t>(given[i])}, {"position", static_cast<std::int64_t>(i)}});
    }
    blocks.set_mark(block, stamp);
  }
  pending.pins.reserve(addresses.size());
  pending.from.reserve(addresses.size());
  for (std::size_t i = 0; i < addresses.size();) {
    PromptNode* node = node_of(addresses[i]);
    const Address* values = node->payload.values.get();
    const auto at = static_cast<std::uint32_t>(std::find(values, values + node->pages, addresses[i]) - values);
    std::uint32_t run = 1;  // addresses [i, i + run) are the node's pages [at, at + run)
    while (i + run < addresses.size() && at + run < node->pages && addresses[i + run] == values[at + run]) ++run;
    if (in_dram(addresses[i])) {
      pending.from.insert(pending.from.end(), addresses.begin() + static_cast<std::ptrdiff_t>(i),
                          addresses.begin() + static_cast<std::ptrdiff_t>(i + run));
    }
    pending.pins.push_back(index_->pin(index_->isolate(node, at, run)));
    i += run;
  }
}

// Reserves blocks of the caller's for what is to come, until the copy is committed.
void Pool::name_swap_in(std::span<const Address> into, PendingSwapIn& pending) {
  if (space_.engine_allocates() && !pending.from.empty()) {
    throw Error(
        ErrorCode::kState,
        "the engine allocates this pool's HBM, and may use its blocks again at any moment: cached blocks cannot "
        "move there, only be copied there by fetch");
  }
  if (into.empty()) {
    if (pending.from.empty()) return;
    if (!two_tiers_) throw Error(ErrorCode::kState, "swap needs both tiers: this pool has no HBM blocks");
    return;
  }
  check_room_named(pending.from.size(), into.size());
  space_.check_active_and_distinct(into.data(), into.size(), /*skip_cached=*/false);
  for (std::size_t i = 0; i < into.size(); ++i) {
    if (medium_bits_of(into[i]) == static_cast<std::uint32_t>(Medium::kHbm)) continue;
    throw Error(ErrorCode::kArgument, "swap_in goes to HBM blocks, and position " + std::to_string(i) + " is in DRAM",
                {{"position", static_cast<std::int64_t>(i)}});
  }
  pending.to.assign(into.begin(), into.end());
  pending.into_named = true;
  // With no owner: what the check above left there as a tag could be some peer's epoch.
  space_.give(into, {BlockState::kReserved, 0, 0});
}

// Where the pages lie now. Nodes have only been cut since: those in DRAM are whole nodes still.
void Pool::find_swap_in(PendingSwapIn& pending) noexcept {
  pending.from.clear();
  for (Address& address : pending.addresses) {
    address = page_of(address);
    if (in_dram(address)) pending.from.push_back(address);  // within the room: there are no more than before
  }
}

// In a thread of the pool. When it returns, what is to be swapped into is the swap's, and the GPU has no more to do
// with it: neither what was freed after the swap was asked for, nor what room was made of.
void Pool::prepare_swap_in(PendingSwapIn& pending, const MoveOrder& order) {
  Lock lock(mutex_);
  guard();
  find_swap_in(pending);
  reserve_swap_in(lock, pending, order);
  // The caller's own blocks are reserved since its call.
  if (pending.into_named || pending.to.empty() || !is_late(TierWay::kIn, order)) return;
  const ReuseCounts now = reuse_counts();
  lock.unlock();
  follow_device(*order.swap(), now);
}

// HBM blocks to swap into: those that the caller named, or others, making room. Lets go of the lock for that.
void Pool::reserve_swap_in(Lock& lock, PendingSwapIn& pending, const MoveOrder& order) {
  const std::size_t moving = pending.from.size();
  if (pending.into_named || !pending.to.empty()) {
    // Another swap in has brought some since: their blocks are not needed. There are never more.
    return give_back_swap_in(pending, moving);
  }
  if (moving == 0) return;
  std::vector<Address> to(moving);
  if (!space_.take(moving, Medium::kHbm, BlockState::kReserved, to.data())) {
    lock.unlock();
    Lock reclaim(reclaim_, std::defer_lock);
    lock_to_reclaim(reclaim, lock, order);
    guard();
    // The copy to the room that is made follows the whole device, unless the caller has named a stream.
    if (order.swap() != nullptr || order.of_device()) probe_device(lock);
    while (!space_.take(moving, Medium::kHbm, BlockState::kReserved, to.data())) make_room(lock, moving, order);
  }
  pending.to = std::move(to);
}

// Lets go of the lock meanwhile.
void Pool::copy_swap_in(Lock& lock, const PendingSwapIn& pending, const MoveOrder& order) {
  struct Over {
    Pool& pool;
    Lock& lock;
    ~Over() {
      lock.lock();
      ++pool.swaps_in_over_;
      pool.swap_in_ended_.notify_all();
    }
  };
  ++swaps_in_begun_;
  lock.unlock();
  const Over over{*this, lock};
  copy_tier(TierWay::kIn, pending.from.data(), pending.to.data(), pending.from.size(), order.at_copy());
}

// Points the index at the copies. Blocks that others may still read by their old address stay, in limbo, until the last
// pin of that time goes. Throws std::bad_alloc with nothing moved.
void Pool::commit_swap_in(PendingSwapIn& pending) {
  const std::vector<Address>& from = pending.from;
  // This call's own pins go first, so that what pins are left are others'.
  for (const IndexPin& pin : pending.pins) index_->unpin(pin);
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
    index_->redirect(node, &pending.to[i]);
    placed(*node);
    if (node->payload.pins > 0) {
      node->payload.has_limbo = true;
      next_limbo->stamp = index_->tick();
      for (std::uint32_t k = 0; k < pages; ++k) {
        BlockStore& dram = store(Medium::kDram);
        dram.set_tag(block_of(from[i + k]), BlockSpace::kCacheTag);
        dram.set_mark(block_of(from[i + k]), block_of(pending.to[i + k]));
      }
      limbo_.push_back(std::move(*next_limbo++));
    } else {
      space_.release(&from[i], pages);
    }
    i += pages;
  }
}

void Pool::unpinned(PromptNode& node, std::uint64_t stamp) noexcept {
  bool more = false;
  for (std::size_t i = 0; i < limbo_.size();) {
    Limbo& limbo = limbo_[i];
    if (limbo.node == &node && stamp < limbo.stamp && --limbo.remaining == 0) {
      space_.release(limbo.blocks.data(), limbo.blocks.size());
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
