// Threads for long work, such as large writes: the most urgent first, and peers in turns (fair_queue.h).
//
// Thread-safety: all of it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "kvpool/base/priority.h"
#include "kvpool/exec/fair_queue.h"

namespace kvpool {

class WorkerPool {
 public:
  // The first work starts the threads. Throws nothing; if the kernel gives no thread at all, run() does the work in its
  // caller's thread.
  // A thread that was idle for `linger` ends; without `linger`, threads stay.
  explicit WorkerPool(int threads, std::optional<std::chrono::milliseconds> linger = std::nullopt);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // `peer` identifies the peer for which the work is done. Throws std::bad_alloc; then it does not run.
  void run(std::uint64_t peer, Priority priority, std::function<void()> work);
  // For work that belongs to no peer.
  void run(Priority priority, std::function<void()> work) { run(0, priority, std::move(work)); }
  // Runs the remaining work, then joins the threads. Work given later runs in its caller's thread. Idempotent.
  void stop() noexcept;

 private:
  void loop();
  bool start_one();
  void leave_locked();

  const int threads_max_;
  const std::optional<std::chrono::milliseconds> linger_;
  std::mutex mutex_;
  std::condition_variable work_;
  FairQueue shares_;
  std::vector<std::thread> threads_;
  std::vector<std::thread> left_;  // ended, or about to; to be joined
  int idle_ = 0;                   // threads that wait, or have been told and not woken yet
  bool stopping_ = false;
};

}  // namespace kvpool
