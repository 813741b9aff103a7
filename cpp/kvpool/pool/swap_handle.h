// The handle of a swap that runs on a thread of the pool.
//
// Thread-safety: all of it. The handle's holder keeps the pool alive. Dropping the handle does not cancel the swap.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/order.h"
#include "kvpool/exec/completion.h"
#include "kvpool/index/pins.h"
#include "kvpool/pool/pool_stats.h"

namespace kvpool {

class Swap {
 public:
  // `pool`: the owner of the pins. `after`: the work that must end before any byte moves; null: none. `since`: the
  // pool's reuse_counts when `after` was recorded.
  Swap(PinOwner& pool, std::shared_ptr<const DeviceOrder> after, const ReuseCounts& since) noexcept
      : pool_(pool), after_(std::move(after)), since_(since) {}
  // Releases the pins that were not taken.
  ~Swap();
  Swap(const Swap&) = delete;
  Swap& operator=(const Swap&) = delete;

  // Whether it has ended, successfully or not; then the next three may be called. After success, every stream and the
  // CPU see its bytes.
  bool done() const noexcept { return completion_.done(); }
  // Returns when it is done, or false at `until_ns` (CLOCK_MONOTONIC).
  bool wait(std::int64_t until_ns);
  // Throws what the waiting verb would throw, kCancelled, and kClosed if the pool was closed before the swap began.
  void rethrow_if_failed() const;
  // What the waiting verb would return: where the blocks lie now.
  const std::vector<Address>& addresses() const noexcept { return addresses_; }
  // The pins of a swap in, which the caller owns from now on; empty if they were taken before.
  std::vector<IndexPin> take_pins() noexcept { return std::exchange(pins_, {}); }

  // Ends it with kCancelled. Does nothing and returns false when it has begun to move bytes, or has ended; making room
  // does not count as moving.
  bool cancel() noexcept { return stop(Phase::kCancelled); }
  // An eventfd that becomes readable when it is done; made at the first call, owned by the handle.
  int done_fd() { return completion_.descriptor(); }

  // --- for the thread that carries it out ---

  // Called once. Waits for the work that must end before any byte moves. Throws kCancelled, kClosed, and as
  // DeviceOrder.
  void start();
  // Waits for this work, too; then `since` replaces the earlier counts. Throws as start(); once it has begun, only
  // kClosed.
  void follow(const DeviceOrder& order, const ReuseCounts& since);
  // Throws kCancelled, kClosed, as follow().
  void check() const;
  // From now on it cannot be cancelled. Throws kCancelled, kClosed, if it was before. Idempotent.
  void begin();
  // The reuse_counts at the time when the work was recorded for which it has waited.
  const ReuseCounts& since() const noexcept { return since_; }
  // REQUIRES: begin() was called.
  void succeed(std::vector<Address>&& addresses, std::vector<IndexPin>&& pins) noexcept;
  void fail(const Error& why) noexcept { completion_.finish(why); }

  // --- for the pool ---

  // As cancel(), with kClosed; a swap that has begun no longer waits for the GPU before it copies.
  void close() noexcept {
    stop(Phase::kClosed);
    stopped_.store(true, std::memory_order_relaxed);
  }

 private:
  enum class Phase : std::uint8_t { kWaiting, kBegun, kCancelled, kClosed };
  bool stop(Phase how) noexcept;
  [[noreturn]] static void throw_stopped(Phase how);

  PinOwner& pool_;
  std::shared_ptr<const DeviceOrder> after_;  // until it begins
  ReuseCounts since_;                         // used by its thread only
  std::atomic<Phase> phase_{Phase::kWaiting};
  std::atomic<bool> stopped_{false};
  std::vector<Address> addresses_;
  std::vector<IndexPin> pins_;
  Completion completion_;
};

}  // namespace kvpool
