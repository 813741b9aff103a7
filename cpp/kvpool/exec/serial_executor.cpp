#include "kvpool/exec/serial_executor.h"

#include <algorithm>
#include <new>
#include <utility>

namespace kvpool {

void SerialExecutor::run(const void* key, Priority priority, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    const auto [queues, is_new] = waiting_.try_emplace(key);
    queues->second[static_cast<std::size_t>(priority)].push_back(std::move(work));
    if (!is_new) return;
  }
  try {
    workers_.run(priority, [this, key] { run_next(key); });
  } catch (const std::bad_alloc&) {
    run_next(key);  // others may have given theirs meanwhile
  }
}

// One thread runs all that waits for a key, and leaves when nothing does.
void SerialExecutor::run_next(const void* key) {
  for (;;) {
    std::function<void()> work;
    {
      const std::lock_guard lock(mutex_);
      Queues& queues = waiting_.at(key);
      const auto queue = std::find_if(queues.begin(), queues.end(), [](const auto& any) { return !any.empty(); });
      if (queue == queues.end()) {
        waiting_.erase(key);
        return;
      }
      work = std::move(queue->front());
      queue->pop_front();
    }
    work();
  }
}

}  // namespace kvpool
