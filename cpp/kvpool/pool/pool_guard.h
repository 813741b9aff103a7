// Whether a pool can be used: it may have been closed, have lost its GPU, or be the copy in a forked child.
//
// Thread-safety: all of it. Its locks are taken inside any other lock of the pool, except for tell_closing(), which is
// called without a lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool_observer.h"

namespace kvpool {

class PoolGuard {
 public:
  PoolGuard() noexcept;
  PoolGuard(const PoolGuard&) = delete;
  PoolGuard& operator=(const PoolGuard&) = delete;

  // Throws kFork, kClosed, and the error with which the pool has failed.
  void check() const {
    check_open();
    if (failed_.load(std::memory_order_acquire)) [[unlikely]] {
      throw Error(*why_failed_);
    }
  }
  // Throws kFork, kClosed.
  void check_open() const;
  // Throws kFork.
  void check_process() const;
  bool in_child() const noexcept;
  bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }
  void mark_closed() noexcept { closed_.store(true, std::memory_order_relaxed); }

  // From now on check() throws `why`. The first call counts. Tells the observer.
  void fail(const Error& why);
  std::optional<Error> failure();

  // Sets the observer; null removes it. REQUIRES: there is no observer yet, or this removes it. When this returns, a
  // removed observer is no longer called.
  void observe(PoolObserver* observer);
  void tell_closing() noexcept;

 private:
  std::atomic<bool> closed_{false};
  std::atomic<bool> failed_{false};
  std::optional<Error> why_failed_;  // written before failed_, under mutex_
  const std::uint32_t made_in_;      // fork generation
  std::mutex closing_;               // held while the observer is told of the close; taken before mutex_
  std::mutex mutex_;
  PoolObserver* observer_ = nullptr;  // set under both
};

}  // namespace kvpool
