#include "kvpool/exec/serial_executor.h"

#include <algorithm>
#include <new>
#include <utility>

namespace kvpool {

// Adds the work. Returns whether the key has to wait for a thread, with this urgency.
bool SerialExecutor::is_to_wait(const void* key, Priority priority, Task& work, bool& is_new) {
  const std::lock_guard lock(mutex_);
  const auto [entry, added] = keys_.try_emplace(key);
  is_new = added;
  Key& one = entry->second;
  try {
    one.queues[static_cast<std::size_t>(priority)].push_back(std::move(work));
  } catch (...) {
    if (added) keys_.erase(entry);
    throw;
  }
  if (!added && (one.running || priority >= one.urgency)) return false;
  one.urgency = priority;
  return true;
}

void SerialExecutor::run(const void* key, Priority priority, Task work) {
  bool is_new = false;
  if (!is_to_wait(key, priority, work, is_new)) return;
  if (!is_new) {
    // It waits for a thread already, and now with more urgent work. Not run here in any case: stop() counts on the task
    // that waits. Where this one cannot be queued, that one does the work.
    static_cast<void>(tasks_.run_later(priority, [this, key] { run_next(key); }));
    return;
  }
  try {
    tasks_.run(priority, [this, key] { run_next(key); });
  } catch (const std::bad_alloc&) {
    run_next(key);  // others may have given theirs meanwhile
  } catch (const Error&) {
    const std::lock_guard lock(mutex_);
    keys_.erase(key);
    throw;
  }
}

// One thread runs all that waits for a key, and leaves when nothing does. When other keys wait for a thread, the key
// goes behind them after each piece.
void SerialExecutor::run_next(const void* key) noexcept {
  for (bool first = true;; first = false) {
    Task work;
    {
      const std::lock_guard lock(mutex_);
      const auto entry = keys_.find(key);
      if (first && (entry == keys_.end() || entry->second.running)) return;  // it has waited twice
      Key& one = entry->second;
      one.running = true;
      const auto queue = std::ranges::find_if(one.queues, [](const auto& any) { return !any.empty(); });
      if (queue == one.queues.end()) {
        keys_.erase(entry);
        return;
      }
      const auto next = static_cast<Priority>(queue - one.queues.begin());
      if (!first && tasks_.waiting() > 0 && tasks_.run_later(next, [this, key] { run_next(key); })) {
        one.running = false;
        one.urgency = next;
        return;
      }
      work = std::move(queue->front());
      queue->pop_front();
    }
    tasks_.run_here(work);
  }
}

}  // namespace kvpool
