// Threads for what takes long: large writes, evictions for peers. The most urgent first.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "kvpool/transfer/request.h"

namespace kvpool {

class Workers {
 public:
  // Starts them with the first work. Throws nothing; when the kernel gives no thread at all, run() works itself.
  // A thread that had nothing to do for `linger` ends; without it, they stay.
  explicit Workers(int threads, std::optional<std::chrono::milliseconds> linger = std::nullopt);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  void run(Priority priority, std::function<void()> work);
  // Runs what is left, then joins. What comes later runs in its caller's thread. Idempotent.
  void stop() noexcept;

 private:
  static constexpr std::size_t kPriorities = 3;
  void loop();
  bool start_one();
  void leave_locked();
  std::function<void()> take_locked();

  const int threads_max_;
  const std::optional<std::chrono::milliseconds> linger_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::array<std::deque<std::function<void()>>, kPriorities> queues_;
  std::vector<std::thread> threads_;
  std::vector<std::thread> left_;  // ended, or about to; to be joined
  int idle_ = 0;                   // threads that wait, or have been told and not woken yet
  std::size_t queued_ = 0;
  bool stopping_ = false;
};

}  // namespace kvpool
