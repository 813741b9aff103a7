// Moves of cached blocks from HBM to DRAM, and room that is made; the other way: swap_in.cpp.
//
// Both directions work the same way: choose and protect blocks under the lock, copy without it, then, under the lock
// again, point the index at the copies. What was chosen may have been cut meanwhile, by a match or an insertion, but no
// block can have left: so each block's node is looked up again by its tag.
#include <algorithm>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/swap_handle.h"

namespace kvpool {

// Counts what hangs below and goes too, of whatever medium; returns what went of this class.
std::size_t Pool::evict_locked(ValueClass value_class, std::size_t n) noexcept {
  const std::uint64_t before = dropped_blocks_;
  const std::size_t evicted = index_->evict(value_class, n);
  counters_.evicted_blocks += dropped_blocks_ - before;
  return evicted;
}

void Pool::make_dram_room(std::size_t n) noexcept {
  const BlockStore& dram = store(Medium::kDram);
  if (dram.free_count() < n) evict_locked(ValueClass::kDram, n - dram.free_count());
}

// Makes at least n HBM blocks free: moves the coldest down, or drops them where DRAM has no room for them even after
// its own coldest blocks went. REQUIRES: reclaim_ is held. Throws kOutOfBlocks, and what copying throws.
void Pool::make_room(Lock& lock, std::size_t n, const MoveOrder& order) {
  const BlockStore& hbm = store(Medium::kHbm);
  const BlockStore& dram = store(Medium::kDram);
  bool probed = false;
  while (hbm.free_count() < n) {
    if (!can_make_room(n, Medium::kHbm)) throw_out_of_blocks_locked(n, Medium::kHbm);
    if (!probed && dram.free_count() < n - hbm.free_count() && can_make_room(1, Medium::kDram)) {
      probed = true;
      if (order.of_device() || is_late(TierWay::kOut, order)) {
        probe_device(lock);
        continue;
      }
    }
    make_dram_room(std::min<std::size_t>(n - hbm.free_count(), dram.capacity()));
    // What went from DRAM may have taken HBM blocks that hung below with it.
    if (hbm.free_count() >= n) return;
    const std::size_t missing = n - hbm.free_count();
    if (missing > dram.free_count()) evict_locked(ValueClass::kHbm, missing - dram.free_count());
    if (hbm.free_count() >= n) return;
    // What a transfer reads is dropped, but not free yet: DRAM may have less room than was made, or none.
    const std::size_t down = std::min<std::size_t>({n - hbm.free_count(), kBatchBlocks, dram.free_count()});
    if (down > 0) move_to_dram(lock, down, nullptr, order);
  }
}

// Moves up to n of the coldest HBM blocks to free DRAM blocks and returns how many went. A block that is matched while
// it is copied stays. Throws what copying throws, with nothing moved. `moved`: of a swap out, whose copy this is; null:
// it makes room. REQUIRES: reclaim_ is held; n DRAM blocks are free. The lock is let go while bytes are copied.
std::size_t Pool::move_to_dram(Lock& lock, std::size_t n, std::vector<Address>* moved, const MoveOrder& order) {
  std::vector<Address> from;
  std::vector<Address> to;
  std::vector<PromptNode*> held;
  n = std::min(n, index_->evictable(ValueClass::kHbm));
  from.reserve(n);
  to.resize(n);
  held.reserve(std::min(n, index_->node_count() + 1));
  if (moved != nullptr) moved->reserve(moved->size() + n);
  try {
    while (from.size() < n) {
      PromptNode* node = index_->hold_coldest(ValueClass::kHbm, n - from.size());
      if (node == nullptr) break;
      held.push_back(node);
      from.insert(from.end(), node->payload.values.get(), node->payload.values.get() + node->pages);
    }
  } catch (...) {
    for (PromptNode* node : held) index_->release_hold(node);
    throw;
  }
  BlockStore& dram = store(Medium::kDram);
  KVPOOL_CHECK(dram.take(static_cast<std::uint32_t>(from.size()), BlockState::kReserved, to.data()));
  const bool late = is_late(TierWay::kOut, order);
  const ReuseCounts now = reuse_counts();

  lock.unlock();
  try {
    if (late) follow_device(*order.swap(), now);
    if (order.swap() != nullptr && moved != nullptr) order.swap()->begin();
    copy_tier(TierWay::kOut, from.data(), to.data(), from.size(), order.at_copy());
  } catch (...) {
    lock.lock();
    space_.release(to.data(), from.size());
    for (std::size_t i = 0; i < from.size();) {
      PromptNode* node = node_of(from[i]);
      i += node->pages;
      index_->release_hold(node);
    }
    throw;
  }
  lock.lock();
  renew(to);

  std::size_t gone = 0;
  for (std::size_t i = 0; i < from.size();) {
    PromptNode* node = node_of(from[i]);
    const std::uint32_t pages = node->pages;
    if (node->payload.pins > 0) {
      space_.release(&to[i], pages);
    } else {
      index_->redirect(node, &to[i]);
      placed(*node);
      space_.release(&from[i], pages);
      if (moved != nullptr) moved->insert(moved->end(), &to[i], &to[i] + pages);
      gone += pages;
    }
    index_->release_hold(node);
    i += pages;
  }
  counters_.swapped_out_blocks += gone;
  return gone;
}

// The addresses that reserved blocks have now: the pool may have joined a cluster while they were copied to.
void Pool::renew(std::vector<Address>& addresses) noexcept {
  for (Address& address : addresses) address = store_of(address).address_of(block_of(address));
}

void Pool::check_two_tiers() const {
  if (space_.engine_allocates()) {
    throw Error(ErrorCode::kState,
                "the engine allocates this pool's HBM: its blocks are never cached, so there are none to swap out");
  }
  if (!two_tiers_) throw Error(ErrorCode::kState, "swap needs both tiers: this pool has no HBM or no DRAM blocks");
}

std::vector<Address> Pool::swap_out(std::size_t n, const CallerStream& after) {
  guard();
  check_stream(after);
  return carry_out_swap(n, after);
}

std::vector<Address> Pool::carry_out_swap(std::size_t n, const MoveOrder& order) {
  Lock reclaim(reclaim_, std::defer_lock);
  Lock lock(mutex_, std::defer_lock);
  lock_to_reclaim(reclaim, lock, order);
  guard();
  check_two_tiers();
  const BlockStore& dram = store(Medium::kDram);
  // No more than DRAM has room for, or a later batch would push out what an earlier one brought.
  n = std::min({n, index_->evictable(ValueClass::kHbm), dram.free_count() + index_->evictable(ValueClass::kDram)});
  std::vector<Address> moved;
  moved.reserve(n);
  // What has moved stays moved when memory runs out, a GPU refuses or the pool is closed; only when nothing has does
  // the caller hear of it.
  while (moved.size() < n) {
    const std::size_t before = moved.size();
    try {
      const bool makes_room = dram.free_count() < std::min(n - before, kBatchBlocks);
      if (makes_room && (order.of_device() || is_late(TierWay::kOut, order))) probe_device(lock);
      const std::size_t batch = std::min({n - before, kBatchBlocks, index_->evictable(ValueClass::kHbm)});
      make_dram_room(std::min<std::size_t>(batch, dram.capacity()));
      move_to_dram(lock, std::min<std::size_t>(batch, dram.free_count()), &moved, order);
    } catch (const std::exception&) {
      if (moved.empty()) throw;
      break;
    }
    if (moved.size() == before) break;
    lock.unlock();  // others get a turn
    lock.lock();
  }
  audit_if_asked();
  return moved;
}

}  // namespace kvpool
