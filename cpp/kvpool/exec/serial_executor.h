// Runs work that may wait for a peer, or for which a peer waits. Work for one peer runs one piece after another, so a
// slow peer delays only itself. It has no threads: it is a class of tasks of an executor.
//
// A key that has work and does not run has a task that waits for a thread, at least as urgent as its most urgent work
// was when that came. More urgent work adds a second or a third task; the one that gets a thread first does the work,
// and what is left of the others counts for the work that comes next. So of each urgency a key has at most one task.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <cstddef>
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
  // How many tasks wait for a thread: at most three for each key.
  std::size_t waiting() const noexcept { return tasks_.waiting(); }

 private:
  static constexpr std::size_t kPriorities = 3;
  struct Key {
    std::array<std::deque<Task>, kPriorities> queues;
    // A task of this urgency is given to the executor, or a caller of run() is about to give the key's first one.
    std::array<bool, kPriorities> awaits{};
    bool running = false;

    bool awaits_any(Priority least) const noexcept;  // with this urgency, or more
  };
  using Keys = std::unordered_map<const void*, Key>;
  bool add(const void* key, Priority priority, Task& work);
  template <Priority kOfTask>
  Task task_of(const void* key) noexcept;
  Task task_of(const void* key, Priority priority) noexcept;
  void run_next(const void* key, Priority of_task) noexcept;
  void erase_if_idle(Keys::iterator entry) noexcept;
  bool goes_on_later(const void* key, Key& one, Priority next) noexcept;

  std::mutex mutex_;
  Keys keys_;        // that have work or a task
  TaskClass tasks_;  // the last: the others are there until its tasks have ended
};

}  // namespace kvpool
