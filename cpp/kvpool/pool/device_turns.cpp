// What the moves of cached blocks wait for on a GPU: docs/adr/0015-swaps-go-both-ways-at-once.md.
#include <utility>

#include "kvpool/blocks/device_mover.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/gpu_call.h"
#include "kvpool/pool/swap_handle.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {
namespace {

// How often a thread waits for the GPU without reclaim_ before it waits with it: otherwise an engine that inserts all
// the time could delay the swap for ever.
constexpr int kWaitsWithoutLock = 2;

}  // namespace

// Whether a swap that chooses blocks now may choose blocks with later work than it has waited for. The GPU may still
// fill blocks that were inserted since, and read blocks that were freed since. The stream of that work is unknown, so
// all work of the device must end once more. Work on DRAM blocks has ended when they are freed, because the CPU may get
// them next. REQUIRES: the space's lock is held.
bool TierMoves::is_late(TierWay way, const MoveOrder& order) const noexcept {
  if (!memory_.on_device() || order.swap() == nullptr) return false;
  const ReuseCounts now = cache_.reuse_counts();
  const ReuseCounts& since = order.swap()->since();
  return way == TierWay::kOut ? now.filled != since.filled : now.freed != since.freed;
}

// In the swap's thread: returns when all work that the GPU has been given so far has ended. `now`: the counts from
// before this call, so that changes in between count as later. Throws kCancelled, kClosed, and as DeviceOrder.
// REQUIRES: the space's lock is not held.
void TierMoves::follow_device(Swap& swap, const ReuseCounts& now) {
  ask_gpu(guard_, [&] {
    swap.check();
    swap.follow(*memory_.order_now({}), now);
  });
}

// Takes both locks, for copies to DRAM. If a thread of the pool has to wait for the GPU first, it waits here without
// them, so that stalled work keeps no other thread from making room.
void TierMoves::lock_to_reclaim(std::unique_lock<std::mutex>& reclaim, SpaceLock& lock, const MoveOrder& order) {
  for (int waits = 0;; ++waits) {
    reclaim.lock();
    lock.lock();
    if (waits == kWaitsWithoutLock || !is_late(TierWay::kOut, order)) return;
    const ReuseCounts now = cache_.reuse_counts();
    lock.unlock();
    reclaim.unlock();
    follow_device(*order.swap(), now);
  }
}

// Before cached blocks are given up for a copy that is to follow the whole device: throws what the GPU would refuse
// that with, as it does while a CUDA graph is captured. Lets go of the lock. REQUIRES: reclaim_ is held.
void TierMoves::probe_device(SpaceLock& lock) {
  if (!memory_.on_device()) return;
  struct Unlocked {
    SpaceLock& lock;
    explicit Unlocked(SpaceLock& held) : lock(held) { lock.unlock(); }
    ~Unlocked() { lock.lock(); }
  };
  const Unlocked unlocked(lock);
  memory_.order_now({});
}

// What was given to the GPU until now is noted here, in the caller's thread.
std::shared_ptr<Swap> TierMoves::make_swap(const CallerStream& after) {
  memory_.check_stream(after);
  std::shared_ptr<const DeviceOrder> order;
  ReuseCounts since;  // read before the order is taken: what comes between the two counts as later
  if (memory_.on_device()) {
    {
      const SpaceLock lock = blocks_.lock();
      since = cache_.reuse_counts();
    }
    order = memory_.order_now(after);
  }
  return std::make_shared<Swap>(pins_, std::move(order), since);
}

}  // namespace kvpool
