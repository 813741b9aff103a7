// A lock that serves its callers in order. Several threads write through one UCX worker, each holding it for many puts
// in a row: with std::mutex the thread that has just released it would take it again.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvpool {

class UcxTurnLock {
 public:
  void lock() noexcept {
    const std::uint32_t turn = next_.fetch_add(1, std::memory_order_relaxed);
    std::uint32_t now = serving_.load(std::memory_order_acquire);
    while (now != turn) {
      serving_.wait(now, std::memory_order_acquire);
      now = serving_.load(std::memory_order_acquire);
    }
  }
  void unlock() noexcept {
    serving_.fetch_add(1, std::memory_order_release);
    serving_.notify_all();
  }
  // Whether another thread waits for the holder. REQUIRES: the caller holds it.
  bool wanted() const noexcept {
    return next_.load(std::memory_order_relaxed) != serving_.load(std::memory_order_relaxed) + 1;
  }

 private:
  std::atomic<std::uint32_t> next_{0};
  std::atomic<std::uint32_t> serving_{0};
};

}  // namespace kvpool
