// The one thread that answers peers: waits for descriptors, timers and posted work.
//
// It sleeps when nothing happens: a reactor with nothing but quiet links wakes at most twice a second. After an event
// it polls for at most 50 us before it sleeps. Timers that fall close together are one wake-up.
//
// An exception does not leave the callback that throws it; the reactor then ignores the callback's watch, as after
// want(0). In a forked child every method does nothing: methods that return void return, methods that can throw throw
// kFork.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace kvpool {

struct ReactorState;

class Reactor {
 public:
  // Starts the thread, with all signals blocked. Throws Error kState when the kernel refuses to.
  explicit Reactor(const char* thread_name);
  // REQUIRES: not in the reactor's thread.
  ~Reactor();
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // Calls ready(epoll events) in the reactor's thread whenever `fd` is (level triggered, EPOLLIN | EPOLLRDHUP, and
  // EPOLLOUT when asked for). Removing the watch ends it; the removal waits for a running call, unless it is made from
  // within that call. Thread-safe.
  // REQUIRES: the descriptor stays open until the watch is removed, and is watched once.
  std::uint64_t watch(int fd, std::function<void(std::uint32_t)> ready);
  void unwatch(std::uint64_t watch) noexcept;
  // Sets the events to watch for; 0 for none (another thread reads the descriptor). Thread-safe, cheap.
  void want(std::uint64_t watch, std::uint32_t events) noexcept;

  // Runs in the reactor's thread, soon, or at `at_ns` (CLOCK_MONOTONIC); timers may be up to 100 ms late when idle.
  void post(std::function<void()> work);
  std::uint64_t at(std::int64_t at_ns, std::function<void()> work);
  void cancel(std::uint64_t timer) noexcept;  // waits as unwatch does

  bool in_thread() const noexcept;
  // Waits until the callback that runs now has returned. Called from within a callback, it returns at once.
  void wait_for_callback() noexcept;
  // Joins the thread; what was posted has run, and each watch that was left has been called a last time with EPOLLHUP.
  // Timers are dropped, and its own descriptors closed. From then on watch, post and at throw kClosed. Idempotent; not
  // from the thread itself.
  void stop() noexcept;
  // False from the moment at which the last calls of stop() begin.
  bool running() const noexcept;
  // How often the thread woke up from sleep.
  std::uint64_t wakeups() const noexcept;

 private:
  bool forked() const noexcept;
  void check_usable() const;
  void start_thread(const char* name);
  void close_descriptors() noexcept;

  std::unique_ptr<ReactorState> state_;  // apart, because it stays where it is when a forked child destroys the reactor
  const std::uint32_t born_;
  std::mutex stop_mutex_;
  bool stopped_ = false;
};

}  // namespace kvpool
