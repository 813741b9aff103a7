// Runs work that may wait for a peer, or for which a peer waits. Work for one peer runs one piece after another, so a
// slow peer delays only itself.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <unordered_map>

#include "kvpool/exec/worker_pool.h"

namespace kvpool {

class SerialExecutor {
 public:
  // At most so many peers have a thread at a time; the others wait for one of these to become free.
  static constexpr int kThreadsMax = 64;

  // Runs the work after earlier work for the same key; more urgent work overtakes work that has not started. `key` is
  // only an identity: it names a peer. Throws std::bad_alloc; then the work does not run.
  void run(const void* key, Priority priority, std::function<void()> work);
  // Runs the remaining work, then joins the threads.
  void stop() noexcept { workers_.stop(); }

 private:
  using Queues = std::array<std::deque<std::function<void()>>, 3>;  // by priority
  void run_next(const void* key);

  std::mutex mutex_;
  std::unordered_map<const void*, Queues> waiting_;  // of keys whose work runs
  WorkerPool workers_{kThreadsMax, std::chrono::milliseconds(1000)};
};

}  // namespace kvpool
