// Tasks of an executor that tests hold and let go.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <vector>

#include "kvpool/exec/executor.h"

namespace kvpool::testing {

// Tasks that report their begin, and end when the test says so.
class HeldTasks {
 public:
  explicit HeldTasks(std::size_t n) : tasks_(n) {}
  ~HeldTasks() {
    go_all();
    while (running_ > 0) usleep(100);  // a running task still uses these members
  }

  Task task(std::size_t i) {
    return [this, i] {
      const int now = ++running_;
      for (int most = most_; now > most && !most_.compare_exchange_weak(most, now);) {
      }
      tasks_[i].begun.set_value();
      tasks_[i].go.get_future().wait();
      --running_;
    };
  }
  void wait_begun(std::size_t i) { tasks_[i].begun_seen.wait(); }
  bool has_begun(std::size_t i) const {
    return tasks_[i].begun_seen.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  std::size_t count_begun() const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < tasks_.size(); ++i) count += has_begun(i) ? 1 : 0;
    return count;
  }
  void go(std::size_t i) {
    if (!tasks_[i].gone) tasks_[i].go.set_value();
    tasks_[i].gone = true;
  }
  void go_all() {
    for (std::size_t i = 0; i < tasks_.size(); ++i) go(i);
  }
  int most() const { return most_; }

 private:
  struct One {
    std::promise<void> begun;
    std::shared_future<void> begun_seen = begun.get_future().share();
    std::promise<void> go;
    bool gone = false;
  };
  std::vector<One> tasks_;
  std::atomic<int> running_{0};
  std::atomic<int> most_{0};
};

inline void wait_for_threads(const Executor& executor, int count) {
  while (executor.threads() != count) usleep(100);  // a test that hangs is ended by its runner
}

}  // namespace kvpool::testing
