// Runs work that may wait for a peer, or for which a peer waits. Work for one peer runs one piece after another, so a
// slow peer delays only itself. It has no threads: it is a class of tasks of an executor.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <unordered_map>

#include "kvpool/exec/executor.h"

namespace kvpool {

class SerialExecutor {
 public:
  // At most so many peers have a thread at a time; the others wait for one of these to become free.
  static constexpr TaskLimits kLimits{8, 64};

  // `executor` outlives it.
  explicit SerialExecutor(Executor& executor, TaskLimits limits = kLimits) : tasks_(executor, limits) {}

  // Runs the work after earlier work for the same key; more urgent work overtakes work that has not started. `key` is
  // only an identity: it names a peer. Throws std::bad_alloc; then the work does not run.
  void run(const void* key, Priority priority, Task work);
  // Runs the remaining work, and returns when it has ended. Work given later runs in its caller's thread.
  void stop() noexcept { tasks_.stop(); }

 private:
  static constexpr std::size_t kPriorities = 3;
  // A key that has work waits for a thread as urgently as its most urgent work did when that came. More urgent work
  // makes it wait a second time; the thread that comes first takes it, and the other finds nothing to do.
  struct Key {
    std::array<std::deque<Task>, kPriorities> queues;
    bool running = false;
    Priority urgency;  // while it is not running
  };
  bool is_to_wait(const void* key, Priority priority, Task& work, bool& is_new);
  void run_next(const void* key) noexcept;

  std::mutex mutex_;
  std::unordered_map<const void*, Key> keys_;  // that have work, or whose work runs
  TaskClass tasks_;                            // the last: the others are there until its tasks have ended
};

}  // namespace kvpool
