// The threads that run swaps for callers that do not wait: one for each direction, started with its first swap.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "kvpool/blocks/device_mover.h"
#include "kvpool/exec/worker_pool.h"
#include "kvpool/pool/swap_handle.h"

namespace kvpool {

class SwapThreads {
 public:
  using Work = std::function<void()>;  // throws nothing, and ends the swap

  SwapThreads() = default;
  ~SwapThreads() { close(); }
  SwapThreads(const SwapThreads&) = delete;
  SwapThreads& operator=(const SwapThreads&) = delete;

  // Runs the work after earlier work of this direction; in this thread if no other can be started, and after close().
  // Throws std::bad_alloc; then the work does not run.
  void run(TierWay way, const std::shared_ptr<Swap>& swap, Work work);
  // Closes all swaps that have not begun to move bytes, and all later ones. Does not wait. Idempotent, as is close().
  void refuse() noexcept;
  // The same, and waits until all have ended.
  void close() noexcept;

 private:
  std::mutex mutex_;
  std::unordered_set<std::shared_ptr<Swap>> unfinished_;             // under mutex_
  bool closed_ = false;                                              // under mutex_
  std::array<WorkerPool, 2> threads_{WorkerPool(1), WorkerPool(1)};  // by TierWay
};

}  // namespace kvpool
