// Swaps. A swap in has three steps: under the lock the arguments are checked and what they name is pinned; then, one
// swap in at a time, blocks are reserved and the bytes copied; under the lock again the index is pointed at the copies,
// and the pages are pinned for the caller. Evictions and swaps out go on beside the second step, for they take nothing
// that is pinned; only room is made as one of them, under reclaim_. A thread of the pool reserves the blocks before its
// turn, for it may have to wait for the GPU to leave them, and nobody else is to wait with it.
//
// Between the first and the second step another swap in may have brought some of the pages (find_move_in).
#include "kvpool/pool/tier_moves.h"

#include <algorithm>

#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/gpu_call.h"
#include "kvpool/pool/swap_handle.h"
#include "kvpool/pool/swap_queue.h"

namespace kvpool {
namespace {

// Waits for what the swap is to follow, and works. Returns why it failed; of one that was stopped before it had begun,
// by whom.
template <class Work>
std::optional<Error> carry_out(PoolGuard& guard, Swap& swap, Work&& work) {
  return failure_of([&] {
    try {
      ask_gpu(guard, [&] { swap.start(); });
      work();
    } catch (...) {
      swap.begin();
      throw;
    }
    swap.begin();  // there was nothing to move
  });
}

}  // namespace

TierMoves::TierMoves(CacheBlocks& blocks, PromptCache& cache, PoolMemory& memory, PoolGuard& guard, PinOwner& pins,
                     Executor& executor)
    : blocks_(blocks),
      cache_(cache),
      memory_(memory),
      guard_(guard),
      pins_(pins),
      swaps_(std::make_unique<SwapQueue>(executor)) {}

TierMoves::~TierMoves() = default;

void TierMoves::refuse() noexcept { swaps_->refuse(); }

void TierMoves::close() noexcept { swaps_->close(); }

void TierMoves::set_mover(TierMover* mover) {
  const Idle nobody_copies = idle();
  memory_.set_mover(mover);
}

// --- out ---

void TierMoves::check_two_tiers() const {
  if (blocks_.engine_allocates()) {
    throw Error(ErrorCode::kState,
                "the engine allocates this pool's HBM: its blocks are never cached, so it has nothing to swap out");
  }
  if (!memory_.two_tiers())
    throw Error(ErrorCode::kState, "swap needs both tiers: this pool has no HBM or no DRAM blocks");
}

std::vector<Address> TierMoves::swap_out(std::size_t n, const CallerStream& after) {
  memory_.check_stream(after);
  return carry_out_swap(n, after);
}

std::vector<Address> TierMoves::carry_out_swap(std::size_t n, const MoveOrder& order) {
  std::unique_lock reclaim(reclaim_, std::defer_lock);
  SpaceLock lock = blocks_.unlocked();
  lock_to_reclaim(reclaim, lock, order);
  guard_.check();
  check_two_tiers();
  // No more than DRAM has room for, or a later batch would push out what an earlier one brought.
  const auto room = [this](std::size_t most) { return blocks_.cacheable(Medium::kDram, most); };
  n = std::min(n, cache_.evictable(Medium::kHbm));
  n = std::min(n, room(n) + cache_.evictable(Medium::kDram));
  std::vector<Address> moved;
  moved.reserve(n);
  // What has moved stays moved when memory runs out, a GPU refuses or the pool is closed; only when nothing has does
  // the caller hear of it.
  while (moved.size() < n) {
    const std::size_t before = moved.size();
    try {
      const bool makes_room = room(kBatchBlocks) < std::min(n - before, kBatchBlocks);
      if (makes_room && (order.of_device() || is_late(TierWay::kOut, order))) probe_device(lock);
      const std::size_t batch = std::min({n - before, kBatchBlocks, cache_.evictable(Medium::kHbm)});
      make_dram_room(std::min<std::size_t>(batch, store(Medium::kDram).capacity()));
      move_to_dram(lock, room(batch), &moved, order);
    } catch (const std::exception&) {
      if (moved.empty()) throw;
      break;
    }
    if (moved.size() == before) break;
    lock.unlock();  // others get a turn
    lock.lock();
  }
  cache_.audit_if_asked();
  return moved;
}

std::shared_ptr<Swap> TierMoves::begin_swap_out(std::size_t n, const CallerStream& after) {
  check_two_tiers();
  auto swap = make_swap(after);
  swaps_->run(TierWay::kOut, swap, [this, swap, n] {
    std::vector<Address> moved;
    const auto failure = carry_out(guard_, *swap, [&] { moved = carry_out_swap(n, MoveOrder(*swap)); });
    failure ? swap->fail(*failure) : swap->succeed(std::move(moved), {});
  });
  return swap;
}

// --- in ---

std::vector<IndexPin> TierMoves::swap_in(std::span<const Address> addresses, std::span<const Address> into,
                                         Address* out, const CallerStream& after) {
  memory_.check_stream(after);
  PendingSwapIn pending;
  check_swap_in(addresses, into, pending);
  finish_swap_in(pending, after);
  std::copy(pending.addresses.begin(), pending.addresses.end(), out);
  return std::move(pending.held);
}

// Checks everything, pins what is to come, and reserves `into`. Throws with nothing of that left.
void TierMoves::check_swap_in(std::span<const Address> given, std::span<const Address> into, PendingSwapIn& pending) {
  pending.held.reserve(given.size());
  const SpaceLock lock = blocks_.lock();
  guard_.check();
  cache_.begin_move_in(given, into, pending);
}

// Brings them. Whatever it throws, it has given back what check_swap_in took. When it is the audit that throws, the
// pages have moved, and nobody has pins on them.
void TierMoves::finish_swap_in(PendingSwapIn& pending, const MoveOrder& order) {
  try {
    if (order.swap() != nullptr) prepare_swap_in(pending, order);
    const std::lock_guard one_at_a_time(swap_in_mutex_);
    SpaceLock lock = blocks_.lock();
    guard_.check();
    cache_.find_move_in(pending);
    reserve_swap_in(lock, pending, order);
    if (order.swap() != nullptr) order.swap()->begin();
    if (!pending.from.empty()) copy_swap_in(lock, pending, order);
    cache_.finish_move_in(pending);
    cache_.audit_if_asked();
  } catch (...) {
    abandon_swap_in(pending);
    throw;
  }
}

// Gives back what was taken for it. Also of a pool that is closed.
void TierMoves::abandon_swap_in(PendingSwapIn& pending) noexcept {
  const SpaceLock lock = blocks_.lock();
  cache_.cancel_move_in(pending);
}

// In a thread of the pool. When it returns, what is to be swapped into is the swap's, and the GPU has no more to do
// with it: neither what was freed after the swap was asked for, nor what room was made of.
void TierMoves::prepare_swap_in(PendingSwapIn& pending, const MoveOrder& order) {
  SpaceLock lock = blocks_.lock();
  guard_.check();
  cache_.find_move_in(pending);
  reserve_swap_in(lock, pending, order);
  // The caller's own blocks are reserved since its call.
  if (pending.into_named || pending.to.empty() || !is_late(TierWay::kIn, order)) return;
  const ReuseCounts now = cache_.reuse_counts();
  lock.unlock();
  follow_device(*order.swap(), now);
}

// HBM blocks to swap into: those that the caller named, or others, making room. Lets go of the lock for that.
void TierMoves::reserve_swap_in(SpaceLock& lock, PendingSwapIn& pending, const MoveOrder& order) {
  const std::size_t moving = pending.from.size();
  if (pending.into_named || !pending.to.empty()) {
    // Another swap in has brought some since: their blocks are not needed. There are never more.
    return cache_.give_back(pending, moving);
  }
  if (moving == 0) return;
  blocks_.check_open(Medium::kHbm);
  std::vector<Address> to(moving);
  if (!blocks_.take_within(moving, Medium::kHbm, BlockState::kReserved, to.data())) {
    lock.unlock();
    std::unique_lock reclaim(reclaim_, std::defer_lock);
    lock_to_reclaim(reclaim, lock, order);
    guard_.check();
    // The copy to the room that is made follows the whole device, unless the caller has named a stream.
    if (order.swap() != nullptr || order.of_device()) probe_device(lock);
    while (!blocks_.take_within(moving, Medium::kHbm, BlockState::kReserved, to.data())) {
      blocks_.check_open(Medium::kHbm);
      if (blocks_.space().has_quotas()) {
        make_room_by_quotas(reclaim, lock, moving, Medium::kHbm);
      } else if (cache_.can_make_room(moving, Medium::kHbm) || !ask_others(reclaim, lock, moving, Medium::kHbm)) {
        make_room(lock, moving, order);
      }
    }
  }
  pending.to = std::move(to);
}

// Lets go of the lock meanwhile.
void TierMoves::copy_swap_in(SpaceLock& lock, const PendingSwapIn& pending, const MoveOrder& order) {
  struct Over {
    TierMoves& moves;
    SpaceLock& lock;
    ~Over() {
      lock.lock();
      ++moves.swaps_in_over_;
      moves.swap_in_ended_.notify_all();
    }
  };
  ++swaps_in_begun_;
  lock.unlock();
  const Over over{*this, lock};
  memory_.copy(TierWay::kIn, pending.from.data(), pending.to.data(), pending.from.size(), order.at_copy());
}

std::shared_ptr<Swap> TierMoves::begin_swap_in(std::span<const Address> addresses, std::span<const Address> into,
                                               const CallerStream& after) {
  auto swap = make_swap(after);
  const auto pending = std::make_shared<PendingSwapIn>();
  check_swap_in(addresses, into, *pending);
  try {
    swaps_->run(TierWay::kIn, swap, [this, swap, pending] {
      const auto failure = carry_out(guard_, *swap, [&] { finish_swap_in(*pending, MoveOrder(*swap)); });
      if (failure) abandon_swap_in(*pending);  // again, unless it did not come so far
      failure ? swap->fail(*failure) : swap->succeed(std::move(pending->addresses), std::move(pending->held));
    });
  } catch (...) {
    abandon_swap_in(*pending);
    throw;
  }
  return swap;
}

std::shared_ptr<Swap> TierMoves::begin_from_disk(const CallerStream& after, bool to_hbm,
                                                 std::function<Brought(Swap&)> bring, std::function<void()> never) {
  auto swap = make_swap(after);
  swaps_->run(TierWay::kIn, swap, [this, swap, to_hbm, bring = std::move(bring), never = std::move(never)]() mutable {
    Brought brought;
    PendingSwapIn pending;
    bool began = false;
    const auto failure = carry_out(guard_, *swap, [&] {
      began = true;
      brought = bring(*swap);
      if (!to_hbm) return swap->begin();
      check_swap_in(brought.first, {}, pending);
      finish_swap_in(pending, MoveOrder(*swap));
    });
    if (!began) never();
    bring = nullptr;
    never = nullptr;
    const bool kept = !failure && !to_hbm;
    if (!kept) pins_.unpin(brought.second.data(), brought.second.size());
    if (failure) {
      swap->fail(*failure);
    } else if (to_hbm) {
      swap->succeed(std::move(pending.addresses), std::move(pending.held));
    } else {
      swap->succeed(std::move(brought.first), std::move(brought.second));
    }
  });
  return swap;
}

// --- copies ---

void TierMoves::copy(TierWay way, std::span<const Address> from, std::span<const Address> to, const CopyOrder& order) {
  const std::lock_guard turn(way == TierWay::kOut ? reclaim_ : swap_in_mutex_);
  guard_.check();
  memory_.copy(way, from.data(), to.data(), from.size(), order);
}

std::shared_ptr<Swap> TierMoves::begin_copy(TierWay way, const CallerStream& after, std::function<void()> work) {
  auto swap = make_swap(after);
  swaps_->run(way, swap, [this, swap, work = std::move(work)]() mutable {
    const auto failure = carry_out(guard_, *swap, [&] {
      swap->begin();
      work();
    });
    work = nullptr;
    failure ? swap->fail(*failure) : swap->succeed({}, {});
  });
  return swap;
}

}  // namespace kvpool
