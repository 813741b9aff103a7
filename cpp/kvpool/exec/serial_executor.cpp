#include "kvpool/exec/serial_executor.h"

#include <algorithm>
#include <new>
#include <utility>

namespace kvpool {

void SerialExecutor::run(const void* key, Priority priority, Task work) {
  {
    const std::lock_guard lock(mutex_);
    const auto [queues, is_new] = waiting_.try_emplace(key);
    queues->second[static_cast<std::size_t>(priority)].push_back(std::move(work));
    if (!is_new) return;
  }
  try {
    tasks_.run(priority, [this, key] { run_next(key); });
  } catch (const std::bad_alloc&) {
    run_next(key);  // others may have given theirs meanwhile
  } catch (const Error&) {
    const std::lock_guard lock(mutex_);
    waiting_.erase(key);
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
      Queues& queues = waiting_.at(key);
      const auto queue = std::find_if(queues.begin(), queues.end(), [](const auto& any) { return !any.empty(); });
      if (queue == queues.end()) {
        waiting_.erase(key);
        return;
      }
      const auto next = static_cast<Priority>(queue - queues.begin());
      if (!first && tasks_.waiting() > 0 && tasks_.run_later(next, [this, key] { run_next(key); })) return;
      work = std::move(queue->front());
      queue->pop_front();
    }
    tasks_.run_here(work);
  }
}

}  // namespace kvpool
