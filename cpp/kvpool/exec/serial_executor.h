// Work that may wait for a peer, or that one waits for: one piece after another for each peer, so that a slow one keeps
// only itself waiting.
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
  // As many peers may keep a thread waiting at a time; more of them wait for each other.
  static constexpr int kThreadsMax = 64;

  // Runs the work after what was given for the same key before, but the most urgent of what waits first. `key` names a
  // peer; it means nothing else. Throws std::bad_alloc; then the work does not run.
  void run(const void* key, Priority priority, std::function<void()> work);
  // Runs what is left, then joins.
  void stop() noexcept { workers_.stop(); }

 private:
  using Queues = std::array<std::deque<std::function<void()>>, 3>;  // by priority
  void run_next(const void* key);

  std::mutex mutex_;
  std::unordered_map<const void*, Queues> waiting_;  // of keys whose work runs
  WorkerPool workers_{kThreadsMax, std::chrono::milliseconds(1000)};
};

}  // namespace kvpool
