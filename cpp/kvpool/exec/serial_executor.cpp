#include "kvpool/exec/serial_executor.h"

#include <algorithm>
#include <new>
#include <type_traits>
#include <utility>

namespace kvpool {

bool SerialExecutor::Key::awaits_any(Priority least) const noexcept {
  const auto end = awaits.begin() + static_cast<std::ptrdiff_t>(least) + 1;
  return std::find(awaits.begin(), end, true) != end;
}

// So small that a Task holds it without further memory: where a task is made, nothing may throw.
template <Priority kOfTask>
Task SerialExecutor::task_of(const void* key) noexcept {
  const auto task = [this, key] { run_next(key, kOfTask); };
  static_assert(sizeof(task) <= 2 * sizeof(void*) && std::is_trivially_copyable_v<decltype(task)>);
  return task;
}

Task SerialExecutor::task_of(const void* key, Priority priority) noexcept {
  if (priority == Priority::kDecode) return task_of<Priority::kDecode>(key);
  if (priority == Priority::kPrefill) return task_of<Priority::kPrefill>(key);
  return task_of<Priority::kBackground>(key);
}

// Adds the work. True: the caller gives the key its first task, of this urgency. Until it has, others rely on it.
bool SerialExecutor::add(const void* key, Priority priority, Task& work) {
  const std::lock_guard lock(mutex_);
  const auto [entry, added] = keys_.try_emplace(key);
  Key& one = entry->second;
  try {
    one.queues[static_cast<std::size_t>(priority)].push_back(std::move(work));
  } catch (...) {
    if (added) keys_.erase(entry);
    throw;
  }
  if (one.running || one.awaits_any(priority)) return false;
  bool& awaits = one.awaits[static_cast<std::size_t>(priority)];
  if (!one.awaits_any(Priority::kBackground)) return awaits = true;
  // It waits for a thread already, and now with more urgent work. Not run here in any case: stop() counts on the task
  // that waits. Where this one cannot be queued, that one does the work. Queued under the lock: others leave work to a
  // task that is awaited, so it must be there.
  awaits = tasks_.run_later(priority, task_of(key, priority));
  return false;
}

void SerialExecutor::run(const void* key, Priority priority, Task work) {
  if (!add(key, priority, work)) return;
  try {
    tasks_.run(priority, task_of(key, priority));
  } catch (const std::bad_alloc&) {
    run_next(key, priority);  // others may have given theirs meanwhile
  } catch (const Error&) {
    const std::lock_guard lock(mutex_);
    keys_.erase(key);
    throw;
  }
}

// REQUIRES: mutex_ is held.
void SerialExecutor::erase_if_idle(Keys::iterator entry) noexcept {
  const Key& one = entry->second;
  if (one.running || one.awaits_any(Priority::kBackground)) return;
  if (std::ranges::all_of(one.queues, [](const auto& queue) { return queue.empty(); })) keys_.erase(entry);
}

// Behind the other keys that wait for a thread. False: that cannot be queued. REQUIRES: mutex_ is held.
bool SerialExecutor::goes_on_later(const void* key, Key& one, Priority next) noexcept {
  if (!one.awaits_any(next)) {
    if (!tasks_.run_later(next, task_of(key, next))) return false;
    one.awaits[static_cast<std::size_t>(next)] = true;
  }
  one.running = false;
  return true;
}

// One thread runs all that waits for a key, and leaves when nothing does. When other keys wait for a thread, the key
// goes behind them after each piece.
void SerialExecutor::run_next(const void* key, Priority of_task) noexcept {
  for (bool first = true;; first = false) {
    Task work;
    {
      const std::lock_guard lock(mutex_);
      const auto entry = keys_.find(key);
      Key& one = entry->second;
      if (first) {
        one.awaits[static_cast<std::size_t>(of_task)] = false;
        if (one.running) return;  // another of its tasks was first
        one.running = true;
      }
      const auto queue = std::ranges::find_if(one.queues, [](const auto& any) { return !any.empty(); });
      if (queue == one.queues.end()) {
        one.running = false;
        return erase_if_idle(entry);
      }
      const auto next = static_cast<Priority>(queue - one.queues.begin());
      if (!first && tasks_.waiting() > 0 && goes_on_later(key, one, next)) return;
      work = std::move(queue->front());
      queue->pop_front();
    }
    tasks_.run_here(work);
  }
}

}  // namespace kvpool
