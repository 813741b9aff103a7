// A swap that a thread of the pool carries out, as its caller sees it.
//
// Thread-safety: all of it. Whoever has one keeps its pool. One that is dropped is carried out all the same.
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
  // `pool`: whose pins these are to be. `after`: what has to end before any byte moves; null: nothing. `since`: the
  // reuse_counts of its blocks when that was noted.
  Swap(PinOwner& pool, std::shared_ptr<const DeviceOrder> after, const ReuseCounts& since) noexcept
      : pool_(pool), after_(std::move(after)), since_(since) {}
  // Lets go of the pins that nobody has taken.
  ~Swap();
  Swap(const Swap&) = delete;
  Swap& operator=(const Swap&) = delete;

  // Whether it has ended, one way or another; then the next three may be called. When it is done its bytes have
  // arrived, for every stream and for the CPU.
  bool done() const noexcept { return completion_.done(); }
  // Returns when it is done, or false at `until_ns` (CLOCK_MONOTONIC).
  bool wait(std::int64_t until_ns);
  // Throws what the verb throws that waits, kCancelled, and kClosed of a pool that was closed before it had begun.
  void rethrow_if_failed() const;
  // What the verb returns that waits: where the blocks lie now.
  const std::vector<Address>& addresses() const noexcept { return addresses_; }
  // Of a swap in: pins on those, the caller's from now on. None when they were taken before.
  std::vector<IndexPin> take_pins() noexcept { return std::exchange(pins_, {}); }

  // It is to end with kCancelled. False when it has begun to move its bytes, or has ended: then nothing changes. To
  // make room for them is no beginning.
  bool cancel() noexcept { return stop(Phase::kCancelled); }
  // An eventfd that becomes readable when it is done; made at the first call, owned by the handle.
  int done_fd() { return completion_.descriptor(); }

  // --- for the thread that carries it out ---

  // Once. Returns when what had to end before any byte moves has ended. Throws kCancelled, kClosed, as DeviceOrder.
  void start();
  // Returns when this has ended, too, so that the reuse_counts counts from `since` on. Throws as start(); when it has
  // begun, kClosed alone.
  void follow(const DeviceOrder& order, const ReuseCounts& since);
  // Throws kCancelled, kClosed, as follow().
  void check() const;
  // From now on its bytes move, or it ends: it is not cancelled any more. Throws kCancelled, kClosed, when it was
  // before. Again: does nothing.
  void begin();
  // What its blocks' reuse_counts was when work was noted that has ended by now.
  const ReuseCounts& since() const noexcept { return since_; }
  // REQUIRES: begin() was called.
  void succeed(std::vector<Address>&& addresses, std::vector<IndexPin>&& pins) noexcept;
  void fail(const Error& why) noexcept { completion_.finish(why); }

  // --- for the pool ---

  // As cancel(), with kClosed; one that has begun waits for nothing of the GPU any more before it copies on.
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
  ReuseCounts since_;                         // its thread's
  std::atomic<Phase> phase_{Phase::kWaiting};
  std::atomic<bool> stopped_{false};
  std::vector<Address> addresses_;
  std::vector<IndexPin> pins_;
  Completion completion_;
};

}  // namespace kvpool
