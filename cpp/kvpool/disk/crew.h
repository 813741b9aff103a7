// Threads that need not end: one that waits for a drive that hangs is left behind, and what it uses stays with it.
//
// Thread-safety: all of it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace kvpool {

class Crew {
 public:
  // Runs the work in a new thread with all signals blocked. `work` keeps alive what it uses. False: there is no thread
  // or no memory.
  bool start(std::function<void()> work) noexcept;
  std::size_t size() const;
  // Returns when all have ended, or at this time (CLOCK_MONOTONIC): whether they have.
  bool wait_until(std::int64_t until_ns);

 private:
  struct Count {
    std::mutex mutex;
    std::condition_variable ended;
    std::size_t running = 0;
  };

  std::shared_ptr<Count> count_ = std::make_shared<Count>();
};

}  // namespace kvpool
