// Runs swaps for callers that do not wait: one at a time for each direction.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "kvpool/blocks/device_mover.h"
#include "kvpool/exec/serial_executor.h"
#include "kvpool/pool/swap_handle.h"

namespace kvpool {

class SwapQueue {
 public:
  using Work = std::function<void()>;  // throws nothing, and ends the swap

  // The executor outlives it.
  explicit SwapQueue(Executor& executor) : swaps_(executor, {kWays, kWays}) {}
  ~SwapQueue() { close(); }
  SwapQueue(const SwapQueue&) = delete;
  SwapQueue& operator=(const SwapQueue&) = delete;

  // Runs the work after earlier work of this direction; in this thread if no other runs swaps or can be started, and
  // after close(). Throws std::bad_alloc; then the work does not run.
  void run(TierWay way, const std::shared_ptr<Swap>& swap, Work work);
  // Closes all swaps that have not begun to move bytes, and all later ones. Does not wait. Idempotent, as is close().
  void refuse() noexcept;
  // The same, and waits until all have ended.
  void close() noexcept;

 private:
  static constexpr int kWays = 2;

  std::mutex mutex_;
  std::unordered_set<std::shared_ptr<Swap>> unfinished_;  // under mutex_
  bool closed_ = false;                                   // under mutex_
  std::array<char, kWays> keys_{};                        // by TierWay: their addresses are the keys of swaps_
  SerialExecutor swaps_;
};

}  // namespace kvpool
