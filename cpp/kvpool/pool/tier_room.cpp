// Room that is made: cached blocks move from HBM to DRAM, or are dropped.
#include <algorithm>

#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/swap_handle.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {

void TierMoves::take_evicting(std::unique_lock<std::mutex>& reclaim, SpaceLock& lock, std::size_t n,
                              MediumChoice medium, BlockState to, Address* out, const MoveOrder& order) {
  bool waited = false;
  while (!blocks_.take_within(n, medium, to, out)) {
    blocks_.check_open(medium);
    if (blocks_.space().has_quotas()) {
      make_room_by_quotas(reclaim, lock, n, medium);
      continue;
    }
    if (!cache_.can_make_room(n, medium)) {
      if (ask_others(reclaim, lock, n, medium)) continue;
      // The blocks of a swap in leave DRAM soon. Waits for only one swap: others may follow without end, and other
      // threads that make room wait for this one.
      if (waited || swaps_in_begun_ == swaps_in_over_ || medium == Medium::kHbm) cache_.throw_out_of_blocks(n, medium);
      swap_in_ended_.wait(lock, [this, over = swaps_in_over_] { return swaps_in_over_ != over; });
      waited = true;
      guard_.check();  // the copy may have ended because the device was lost
      continue;
    }
    if (medium == Medium::kHbm) {
      make_room(lock, n, order);
    } else if (medium == Medium::kDram) {
      make_dram_room(n);
    } else {
      // MIXED has taken what is free of both: the coldest DRAM blocks go, then the coldest HBM blocks.
      const bool hbm_too = blocks_.gives(medium, Medium::kHbm);
      const std::size_t in_hbm = hbm_too ? blocks_.free_blocks(Medium::kHbm) : 0;
      const std::size_t in_dram =
          std::min(n - in_hbm, blocks_.free_blocks(Medium::kDram) + cache_.evictable(Medium::kDram));
      make_dram_room(in_dram);
      const std::size_t have = blocks_.free_blocks(Medium::kDram) + blocks_.free_blocks(Medium::kHbm);
      if (have < n && hbm_too) cache_.evict(Medium::kHbm, n - have);
    }
  }
}

// In a space with quotas its hook decides whose blocks go, this cache's among them. Throws what the hook throws.
void TierMoves::make_room_by_quotas(std::unique_lock<std::mutex>& reclaim, SpaceLock& lock, std::size_t n,
                                    MediumChoice medium) {
  const std::shared_ptr<PressureHook> hook = blocks_.space().pressure_hook();
  if (hook == nullptr) cache_.throw_out_of_blocks(n, medium);
  const std::size_t in_hbm = medium.is_mixed() ? blocks_.takeable(n, Medium::kHbm) : 0;
  lock.unlock();
  reclaim.unlock();
  if (!medium.is_mixed()) {
    hook->relieve(blocks_, medium, n);
  } else if (!relieve_if_possible(*hook, Medium::kDram, n - in_hbm)) {
    // As much of DRAM as there is, and HBM evicts for the rest.
    lock.lock();
    const std::size_t in_dram = blocks_.takeable(n, Medium::kDram);
    lock.unlock();
    hook->relieve(blocks_, Medium::kHbm, n - in_dram);
  }
  reclaim.lock();
  lock.lock();
  guard_.check();
}

bool TierMoves::relieve_if_possible(PressureHook& hook, Medium medium, std::size_t n) {
  try {
    hook.relieve(blocks_, medium, n);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfBlocks) throw;
    return false;
  }
}

std::size_t TierMoves::spill(std::size_t n) {
  const auto reclaim = reclaiming();
  SpaceLock lock = blocks_.lock();
  guard_.check();
  std::size_t moved = 0;
  while (moved < n) {
    const std::size_t wanted = std::min({n - moved, kBatchBlocks, cache_.evictable(Medium::kHbm)});
    const std::size_t step = blocks_.cacheable(Medium::kDram, wanted);
    const std::size_t gone = step == 0 ? 0 : move_to_dram(lock, step, nullptr, MoveOrder(CallerStream()));
    if (gone == 0) break;
    moved += gone;
  }
  cache_.audit_if_asked();
  return moved;
}

// Lets the space's hook take units from other caches, without the locks: it may evict there, and they may ask the same
// of this one. Returns whether this cache can have more blocks than before, so that nobody asks without end.
bool TierMoves::ask_others(std::unique_lock<std::mutex>& reclaim, SpaceLock& lock, std::size_t n, MediumChoice medium) {
  const std::shared_ptr<PressureHook> hook = blocks_.space().pressure_hook();
  const std::size_t before = cache_.possible(medium);
  if (hook == nullptr || n > blocks_.capacity(medium) || n <= before) return false;
  lock.unlock();
  reclaim.unlock();
  hook->relieve(blocks_, medium, n - before);
  reclaim.lock();
  lock.lock();
  guard_.check();
  return cache_.possible(medium) > before;
}

std::size_t TierMoves::evict(std::size_t n, MediumChoice medium) {
  const auto reclaim = reclaiming();
  std::size_t dropped = 0;
  for (const Medium tier : {Medium::kDisk, Medium::kDram, Medium::kHbm}) {
    if (!medium.includes(tier)) continue;
    for (bool more = true; more && dropped < n;) {
      const SpaceLock lock = blocks_.lock();
      guard_.check();
      const std::size_t batch = std::min(n - dropped, kBatchBlocks);
      const std::size_t gone = cache_.evict(tier, batch);
      dropped += gone;
      more = gone == batch;
      cache_.audit_if_asked();
    }
  }
  return dropped;
}

void TierMoves::make_dram_room(std::size_t n) noexcept {
  const std::size_t room = blocks_.cacheable(Medium::kDram, n);
  if (room < n) cache_.evict(Medium::kDram, n - room);
}

// Makes at least n HBM blocks free: moves the coldest down, or drops them where DRAM has no room for them even after
// its own coldest blocks went. REQUIRES: reclaim_ is held. Throws kOutOfBlocks, and what copying throws.
void TierMoves::make_room(SpaceLock& lock, std::size_t n, const MoveOrder& order) {
  const auto in_hbm = [&] { return blocks_.free_blocks(Medium::kHbm, n); };
  const auto in_dram = [&] { return blocks_.free_blocks(Medium::kDram, n); };
  bool probed = false;
  while (in_hbm() < n) {
    if (!cache_.can_make_room(n, Medium::kHbm)) cache_.throw_out_of_blocks(n, Medium::kHbm);
    if (!probed && in_dram() < n - in_hbm() && cache_.can_make_room(1, Medium::kDram)) {
      probed = true;
      if (order.of_device() || is_late(TierWay::kOut, order)) {
        probe_device(lock);
        continue;
      }
    }
    make_dram_room(std::min<std::size_t>(n - in_hbm(), store(Medium::kDram).capacity()));
    // What went from DRAM may have taken HBM blocks that hung below with it.
    if (in_hbm() >= n) return;
    const std::size_t missing = n - in_hbm();
    if (missing > in_dram()) cache_.evict(Medium::kHbm, missing - in_dram());
    if (in_hbm() >= n) return;
    // What a transfer reads is dropped, but not free yet: DRAM may have less room than was made, or none.
    const std::size_t down = std::min({n - in_hbm(), kBatchBlocks, in_dram()});
    if (down > 0) move_to_dram(lock, down, nullptr, order);
  }
}

// Moves up to n of the coldest HBM blocks to free DRAM blocks and returns how many went. A block that is matched while
// it is copied stays. Throws what copying throws, with nothing moved. `moved`: of a swap out, whose copy this is; null:
// it makes room. REQUIRES: reclaim_ is held; n DRAM blocks are free. The lock is let go while bytes are copied.
std::size_t TierMoves::move_to_dram(SpaceLock& lock, std::size_t n, std::vector<Address>* moved,
                                    const MoveOrder& order) {
  if (moved != nullptr) moved->reserve(moved->size() + n);
  PromptCache::MoveOut move = cache_.begin_move_out(n);
  const bool late = is_late(TierWay::kOut, order);
  const ReuseCounts now = cache_.reuse_counts();

  lock.unlock();
  try {
    if (late) follow_device(*order.swap(), now);
    if (order.swap() != nullptr && moved != nullptr) order.swap()->begin();
    memory_.copy(TierWay::kOut, move.from.data(), move.to.data(), move.from.size(), order.at_copy());
  } catch (...) {
    lock.lock();
    cache_.cancel_move_out(move);
    throw;
  }
  lock.lock();
  return cache_.finish_move_out(move, moved);
}

}  // namespace kvpool
