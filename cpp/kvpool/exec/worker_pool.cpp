#include "kvpool/exec/worker_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace kvpool {

WorkerPool::WorkerPool(int threads, std::optional<std::chrono::milliseconds> linger)
    : threads_max_(threads), linger_(linger) {}

WorkerPool::~WorkerPool() { stop(); }

// Signals are for the threads of the program, not for ours.
bool WorkerPool::start_one() {
  for (std::thread& thread : left_) thread.join();  // it has let go of the lock for the last time
  left_.clear();
  left_.reserve(threads_.size() + 1);  // to leave must not fail
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    threads_.emplace_back([this] { loop(); });
    pthread_setname_np(threads_.back().native_handle(), "kvpool-work");
  } catch (const std::exception&) {  // no thread, or no memory for one
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void WorkerPool::run(std::uint64_t peer, Priority priority, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    bool served = !stopping_;
    // A thread that was told of earlier work, and has not woken yet, is not there for this.
    if (served && static_cast<std::size_t>(idle_) <= shares_.size() &&
        static_cast<int>(threads_.size()) < threads_max_) {
      served = start_one() || !threads_.empty();
    }
    if (served) {
      shares_.add(peer, priority, std::move(work));
      work_.notify_one();
      return;
    }
  }
  work();
}

void WorkerPool::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (std::function<void()> work = shares_.take()) {
      lock.unlock();
      work();
      work = nullptr;  // what it kept alive goes without the lock
      lock.lock();
    } else if (stopping_) {
      return;
    } else {
      ++idle_;
      bool late = false;
      if (linger_) {
        late = work_.wait_for(lock, *linger_) == std::cv_status::timeout;
      } else {
        work_.wait(lock);
      }
      --idle_;
      if (late && shares_.size() == 0 && !stopping_) return leave_locked();
    }
  }
}

// REQUIRES: mutex_ is held, to the end of the thread.
void WorkerPool::leave_locked() {
  const auto self = std::find_if(threads_.begin(), threads_.end(), [](const std::thread& thread) {
    return thread.get_id() == std::this_thread::get_id();
  });
  left_.push_back(std::move(*self));
  threads_.erase(self);
}

void WorkerPool::stop() noexcept {
  std::vector<std::thread> threads;
  std::vector<std::thread> left;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
    left.swap(left_);
  }
  work_.notify_all();
  for (std::thread& thread : threads) thread.join();
  for (std::thread& thread : left) thread.join();
}

}  // namespace kvpool
