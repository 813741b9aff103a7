// The threads of one pool, under one cap. Every task belongs to a class (large writes, swaps, answers to peers, ...),
// and no class can occupy the threads that another needs:
//
//   reserved     so many tasks of a class can always run at once, whatever the other classes do
//   most         more than that never run at once
//   shared       beyond what is reserved, the classes together have so many threads, first come, first served
//
//   cap = shared + the sum of what the classes have reserved
//
// Threads start when a task finds none idle, and block all signals. The thread that became idle last works first, so
// that those that are too many become idle for `linger`, and end. The last few stay until close(): a task that comes
// now and then wakes a thread, which is faster than to start one.
//
// A task that a thread can take at once is handed to it and passes no queue. Others wait in the queue of their class:
// the most urgent first, and peers in turns (fair_queue.h).
//
// A task should throw nothing. What one throws all the same ends that task, and is told to `on_escape`.
//
// After fork, run() throws kFork in the child, and destruction there touches nothing.
//
// Thread-safety: all of it, but for construction and destruction.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/priority.h"

namespace kvpool {

using Task = std::function<void()>;

struct TaskLimits {
  int reserved = 1;  // at least 1
  int most = 1;      // at least `reserved`
};

struct ExecutorOptions {
  int shared = 96;
  std::chrono::milliseconds linger{1000};
  std::size_t stay = 2;  // so many idle threads
};

class Executor {
 public:
  using OnEscape = std::function<void(const Error&)>;

  Executor() : Executor(OnEscape()) {}
  explicit Executor(OnEscape on_escape, const ExecutorOptions& options = {});
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  int threads() const;      // at this moment
  int threads_max() const;  // the cap, with the classes that there are

  // Stops each class (TaskClass::stop), then joins the threads. Idempotent.
  void close() noexcept;

 private:
  friend class TaskClass;
  struct Class;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class TaskClass {
 public:
  // The executor outlives it.
  TaskClass(Executor& executor, TaskLimits limits);
  ~TaskClass();
  TaskClass(const TaskClass&) = delete;
  TaskClass& operator=(const TaskClass&) = delete;

  // Runs the task in a thread of the executor, as soon as the limits let it. `peer` is only an identity: it names the
  // peer for which the work is done. After stop(), and when the kernel gives no thread while none works for this class,
  // runs it here and now; but an event loop (base/event_loop.h) leaves it to the next thread that is free, if there is
  // any thread at all. Throws std::bad_alloc: then it does not run; and kFork.
  void run(std::uint64_t peer, Priority priority, Task task);
  // For work that belongs to no peer.
  void run(Priority priority, Task task) { run(0, priority, std::move(task)); }
  // Runs the task in another thread if one can begin at once, and else returns false.
  bool try_run(Task task) noexcept;
  // For a task of this class that is about to return: the given one goes behind those that wait, and runs also when
  // stop() waits for the rest. Returns false, and it does not run, if memory ran out or no thread works for this class.
  bool run_later(Priority priority, Task task) noexcept;
  // Runs the task here. What it throws goes where the throws of all tasks go.
  void run_here(const Task& task) noexcept;
  // How many tasks wait for a thread.
  std::size_t waiting() const noexcept;
  // Returns when all tasks that were given have ended. REQUIRES: this is no task of this class. Idempotent.
  void stop() noexcept;

 private:
  Executor::Impl& executor_;
  std::unique_ptr<Executor::Class> class_;
};

}  // namespace kvpool
