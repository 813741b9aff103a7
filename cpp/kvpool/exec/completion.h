// How a caller learns that work has ended: a flag, a condition, and an eventfd for event loops.
//
// Thread-safety: all of it. finish() comes once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

#include "kvpool/base/error.h"

namespace kvpool {

class Completion {
 public:
  Completion() = default;
  ~Completion();
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // REQUIRES: done().
  const std::optional<Error>& error() const noexcept { return error_; }
  // Everything written before is visible to a thread that sees done().
  void finish(std::optional<Error> error = std::nullopt) noexcept;
  // Returns when it is done, or at this time (CLOCK_MONOTONIC).
  void sleep_until(std::int64_t until_ns);
  // Readable once done; made by the first call. Throws Error kState when the process has no descriptors left.
  int descriptor();

 private:
  std::atomic<bool> done_{false};
  std::optional<Error> error_;
  std::mutex mutex_;
  std::condition_variable ended_;
  int event_ = -1;
};

}  // namespace kvpool
