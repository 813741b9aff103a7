// The state that a reactor shares with its thread, and the thread's loop. Only reactor.cpp includes this.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvpool/net/descriptor.h"

namespace kvpool {

inline constexpr std::uint64_t kReactorWakeId = 0;  // of the eventfd; watches and timers count from 1

struct ReactorWatch {
  int fd;
  std::function<void(std::uint32_t)> ready;
};

// Everything that the thread uses. It stays where it is when the reactor is destroyed in a forked child.
//
// Invariants, all under `mutex`:
//   1. `running_id` is the id of the watch or timer whose callback runs now, or 0; only the thread changes it.
//   2. A callback that is not in `watches` (`timers`) is no longer called, unless it is running_id.
//   3. While `sleeping`, `posted` is empty or the eventfd has been written, and the thread wakes by the first timer.
//   4. `waking` counts the threads that write to the eventfd without the mutex. After the loop thread has ended, no
//      thread starts such a write.
struct ReactorState {
  std::mutex mutex;
  std::condition_variable callback_over;
  std::unordered_map<std::uint64_t, std::shared_ptr<ReactorWatch>> watches;
  std::map<std::pair<std::int64_t, std::uint64_t>, std::function<void()>> timers;
  std::unordered_map<std::uint64_t, std::int64_t> timer_times;
  std::vector<std::function<void()>> posted;
  std::uint64_t last_id = 0;
  std::uint64_t running_id = 0;
  std::uint64_t calls = 0;  // that are over
  bool sleeping = false;
  bool stopping = false;
  bool over = false;  // nothing new is taken
  std::int64_t sleeping_until = 0;

  Descriptor epoll;
  Descriptor wake;
  pthread_t thread{};
  std::atomic<bool> running{true};
  std::atomic<std::uint64_t> wakeups{0};
  std::atomic<std::uint32_t> waking{0};

  // Wakes the thread if it sleeps. REQUIRES: `lock` holds mutex; it is given back.
  void wake_thread(std::unique_lock<std::mutex>& lock) noexcept;
};

// When a reactor that sleeps wakes for a timer of this time.
std::int64_t waking_time(std::int64_t at_ns) noexcept;

// The thread's work until `stopping`, and the end of it.
void run_reactor(ReactorState& state) noexcept;

}  // namespace kvpool
