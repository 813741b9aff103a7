// Swaps whose callers do not wait, and what they wait for: docs/adr/0015-swaps-go-both-ways-at-once.md.
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/gpu_call.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/swap_handle.h"
#include "kvpool/pool/swap_threads.h"

namespace kvpool {
namespace {

// How often a thread waits for the GPU without reclaim_ before it does with it: an engine that inserts all the time
// would keep it from its swap for ever.
constexpr int kLooksWithoutLock = 2;

// Waits for what the swap is to follow, and works. Returns why it failed; of one that was stopped before it had begun,
// by whom.
template <class Work>
std::optional<Error> carry_out(Pool& pool, Swap& swap, Work&& work) {
  return failure_of([&] {
    try {
      ask_gpu(pool, [&] { swap.start(); });
      work();
    } catch (...) {
      swap.begin();
      throw;
    }
    swap.begin();  // there was nothing to move
  });
}

}  // namespace

// REQUIRES: mutex_ is held.
ReuseCounts Pool::reuse_counts() noexcept { return {counters_.inserted_blocks, store(Medium::kHbm).released()}; }

// Whether blocks that are chosen now for a swap may be of later than what it has waited for. The GPU may still fill
// what was inserted since, and read what was freed since. In which stream nobody has said, so that all work of the
// device has to end once more. Of blocks of DRAM the work has ended when they are freed: the CPU may have them next.
// REQUIRES: mutex_ is held.
bool Pool::is_late(TierWay way, const MoveOrder& order) noexcept {
  if (!on_device_ || order.swap() == nullptr) return false;
  const ReuseCounts now = reuse_counts();
  const ReuseCounts& since = order.swap()->since();
  return way == TierWay::kOut ? now.filled != since.filled : now.freed != since.freed;
}

// In the swap's thread: returns when all has ended that the GPU has been given by now. `now`: from before, so that what
// comes between the two counts as later. Throws kCancelled, kClosed, as DeviceOrder. REQUIRES: mutex_ is not held.
void Pool::follow_device(Swap& swap, const ReuseCounts& now) {
  ask_gpu(*this, [&] {
    swap.check();
    swap.follow(*DeviceOrder::after_now(arena(Medium::kHbm)->context(), std::nullopt), now);
  });
}

// Takes both, for copies to DRAM. Where a thread of the pool has to wait for the GPU first it does so here without
// them: work that stalls keeps nobody else from making room.
void Pool::lock_to_reclaim(Lock& reclaim, Lock& lock, const MoveOrder& order) {
  for (int look = 0;; ++look) {
    reclaim.lock();
    lock.lock();
    if (look == kLooksWithoutLock || !is_late(TierWay::kOut, order)) return;
    const ReuseCounts now = reuse_counts();
    lock.unlock();
    reclaim.unlock();
    follow_device(*order.swap(), now);
  }
}

// Before cached blocks are given up for a copy that is to follow the whole device: throws what the GPU would refuse
// that with, as it does while a CUDA graph is captured. Lets go of the lock. REQUIRES: reclaim_ is held.
void Pool::probe_device(Lock& lock) {
  if (!on_device_) return;
  struct Unlocked {
    Lock& lock;
    explicit Unlocked(Lock& held) : lock(held) { lock.unlock(); }
    ~Unlocked() { lock.lock(); }
  };
  const Unlocked unlocked(lock);
  ask_gpu(*this, [&] { DeviceOrder::after_now(arena(Medium::kHbm)->context(), std::nullopt); });
}

// What was given to the GPU until now is noted here, in the caller's thread.
std::shared_ptr<Swap> Pool::make_swap(const CallerStream& after) {
  check_stream(after);
  std::shared_ptr<const DeviceOrder> order;
  ReuseCounts since;  // read before the order is taken: what comes between the two counts as later
  if (on_device_) {
    {
      const std::lock_guard lock(mutex_);
      since = reuse_counts();
    }
    order = ask_gpu(*this, [&] { return DeviceOrder::after_now(arena(Medium::kHbm)->context(), after); });
  }
  return std::make_shared<Swap>(*this, std::move(order), since);
}

std::shared_ptr<Swap> Pool::begin_swap_out(std::size_t n, const CallerStream& after) {
  guard();
  check_two_tiers();
  auto swap = make_swap(after);
  swap_threads_->run(TierWay::kOut, swap, [this, swap, n] {
    std::vector<Address> moved;
    const auto failure = carry_out(*this, *swap, [&] { moved = carry_out_swap(n, MoveOrder(*swap)); });
    failure ? swap->fail(*failure) : swap->succeed(std::move(moved), {});
  });
  return swap;
}

std::shared_ptr<Swap> Pool::begin_swap_in(std::span<const Address> addresses, std::span<const Address> into,
                                          const CallerStream& after) {
  guard();
  auto swap = make_swap(after);
  const auto pending = std::make_shared<PendingSwapIn>();
  begin_swap_in(addresses, into, *pending);
  try {
    swap_threads_->run(TierWay::kIn, swap, [this, swap, pending] {
      const auto failure = carry_out(*this, *swap, [&] { finish_swap_in(*pending, MoveOrder(*swap)); });
      if (failure) abandon_swap_in(*pending);  // again, unless it did not come so far
      failure ? swap->fail(*failure) : swap->succeed(std::move(pending->addresses), std::move(pending->held));
    });
  } catch (...) {
    abandon_swap_in(*pending);
    throw;
  }
  return swap;
}

}  // namespace kvpool
