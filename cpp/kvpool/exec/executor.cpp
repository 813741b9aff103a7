#include "kvpool/exec/executor.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/check.h"
#include "kvpool/base/event_loop.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/base/signals_blocked.h"
#include "kvpool/exec/fair_queue.h"

namespace kvpool {

struct Executor::Class {
  explicit Class(TaskLimits given) : limits(given) {}

  const TaskLimits limits;
  int running = 0;  // tasks that threads have
  bool stopped = false;
  FairQueue queue;
  std::atomic<std::size_t> waiting{0};  // as long as the queue
};

// Invariants, under `mutex`
//   E3  Each class has at most `most` tasks running, and all classes together at most `options.shared` beyond what they
//       have reserved: `shared` counts these.
//   E4  No thread is idle while a class has a waiting task that may begin.
//   E5  A class with waiting tasks has a running one, or, when an event loop gave them and no thread could be started,
//       another class has: each task that ends takes the next one that may begin, so that a queue never stands still.
struct Executor::Impl {
  struct Thread {
    ~Thread() {
      if (thread.joinable()) thread.join();
    }

    std::condition_variable wake;
    Class* of = nullptr;  // of the task that it has; null: it has none
    Task task;
    std::list<Thread>::iterator at;  // where it is in `threads`
    std::thread thread;
  };

  Impl(OnEscape told, const ExecutorOptions& given) : on_escape(std::move(told)), options(given) {}

  bool forked() const noexcept { return generation != fork_generation(); }
  bool may_begin(const Class& of) const noexcept {
    return of.running < of.limits.most && (of.running < of.limits.reserved || shared < options.shared);
  }
  void begin(Class& of) noexcept { shared += ++of.running > of.limits.reserved ? 1 : 0; }
  void end(Class& of) noexcept;
  bool give(Class& of, Task& task, bool may_wait, std::uint64_t peer, Priority priority);
  bool hand_to_thread(Class& of, Task& task, std::list<Thread>& ended) noexcept;
  bool start_thread(Class& of, Task& task) noexcept;
  void take_next(Thread& self, Class& ended) noexcept;
  void run_escaping(const Task& task) noexcept;
  void stop(Class& of) noexcept;
  void close() noexcept;
  void loop(Thread& self) noexcept;

  const OnEscape on_escape;
  const Error thrown{ErrorCode::kState, "a task has thrown, and no memory was left to say what"};
  const ExecutorOptions options;
  const std::uint32_t generation = fork_generation();
  std::mutex mutex;
  std::condition_variable drained;  // a class has no task left
  std::vector<Class*> classes;
  std::size_t turn = 0;  // the class that is asked first for a waiting task
  int shared = 0;
  bool closing = false;
  std::list<Thread> threads;
  std::list<Thread> left;     // ended, or about to
  std::vector<Thread*> idle;  // the one that became idle last is the last; has room for all threads
};

// --- under the lock ---

void Executor::Impl::end(Class& of) noexcept {
  shared -= of.running-- > of.limits.reserved ? 1 : 0;
  if (of.stopped && of.running == 0 && of.queue.size() == 0) drained.notify_all();
}

// False, with the task as it was, if no thread can begin it now.
bool Executor::Impl::hand_to_thread(Class& of, Task& task, std::list<Thread>& ended) noexcept {
  if (idle.empty()) {
    ended.splice(ended.end(), left);
    if (!start_thread(of, task)) return false;
  } else {
    Thread& thread = *idle.back();
    idle.pop_back();
    thread.of = &of;
    thread.task = std::move(task);
    thread.wake.notify_one();  // under the lock: a thread that has its task may end at any time without it
  }
  begin(of);
  return true;
}

bool Executor::Impl::start_thread(Class& of, Task& task) noexcept {
  std::list<Thread> started;
  try {
    idle.reserve(threads.size() + 1);
    started.emplace_back();
    Thread& thread = started.back();
    thread.at = started.begin();
    thread.of = &of;
    thread.task.swap(task);
    const SignalsBlocked blocked;
    thread.thread = std::thread([this, &thread] { loop(thread); });
    pthread_setname_np(thread.thread.native_handle(), "kvpool-work");
  } catch (const std::exception&) {  // no thread, or no memory for one
    if (!started.empty()) task.swap(started.back().task);
    return false;
  }
  threads.splice(threads.end(), started);
  return true;
}

// The classes take turns. One that has no other thread left goes first: nothing else would look at its queue (E5).
void Executor::Impl::take_next(Thread& self, Class& ended) noexcept {
  Class* next = ended.running == 0 && ended.queue.size() > 0 ? &ended : nullptr;
  for (std::size_t i = 0; next == nullptr && i < classes.size(); ++i) {
    Class& of = *classes[turn++ % classes.size()];
    if (of.queue.size() > 0 && may_begin(of)) next = &of;
  }
  if (next == nullptr) return;
  self.of = next;
  self.task = next->queue.take();
  next->waiting.store(next->queue.size(), std::memory_order_relaxed);
  begin(*next);
}

// --- threads ---

void Executor::Impl::run_escaping(const Task& task) noexcept {
  const auto tell = [this](const Error& error) noexcept {
    try {
      if (on_escape) on_escape(error);
    } catch (const std::exception&) {  // there is nobody else to tell
    }
  };
  try {
    task();
  } catch (const Error& error) {
    tell(error);
  } catch (const std::exception& error) {
    try {
      tell(Error(ErrorCode::kState, std::string("a task has thrown: ") + error.what()));
    } catch (const std::bad_alloc&) {  // of the text: tell() throws nothing
      tell(thrown);
    }
  }
}

void Executor::Impl::loop(Thread& self) noexcept {
  std::unique_lock lock(mutex);
  for (;;) {
    if (Class* const of = self.of) {
      Task task = std::move(self.task);
      lock.unlock();
      run_escaping(task);
      task = nullptr;  // what it kept alive goes without the lock, and before its class counts it as ended
      lock.lock();
      self.of = nullptr;
      end(*of);
      take_next(self, *of);
      continue;
    }
    if (closing) return;
    const bool stays = idle.size() < options.stay;  // those below it stay, too, and it is woken before them
    idle.push_back(&self);
    const auto told = [&] { return self.of != nullptr || closing; };
    if (stays) {
      self.wake.wait(lock, told);
    } else {
      self.wake.wait_for(lock, options.linger, told);
    }
    if (self.of != nullptr) continue;  // who gave the task has taken it from the idle ones
    idle.erase(std::find(idle.begin(), idle.end(), &self));
    if (closing) return;
    left.splice(left.end(), threads, self.at);
    return;
  }
}

bool Executor::Impl::give(Class& of, Task& task, bool may_wait, std::uint64_t peer, Priority priority) {
  std::list<Thread> ended;  // joined without the lock
  const std::lock_guard lock(mutex);
  if (of.stopped) return false;
  if (may_begin(of)) {
    if (hand_to_thread(of, task, ended)) return true;
    const bool others_look = in_event_loop && !threads.empty();  // each, when its task ends
    if (of.running == 0 && !others_look) return false;
  }
  if (!may_wait) return false;
  of.queue.add(peer, priority, std::move(task));
  of.waiting.store(of.queue.size(), std::memory_order_relaxed);
  return true;
}

void Executor::Impl::stop(Class& of) noexcept {
  std::unique_lock lock(mutex);
  of.stopped = true;
  drained.wait(lock, [&] { return of.running == 0 && of.queue.size() == 0; });
}

void Executor::Impl::close() noexcept {
  std::list<Thread> ended;  // joined without the lock
  std::unique_lock lock(mutex);
  for (Class* of : classes) of->stopped = true;
  drained.wait(lock, [this] {
    return std::ranges::all_of(classes, [](const Class* of) { return of->running == 0 && of->queue.size() == 0; });
  });
  closing = true;
  for (Thread* thread : idle) thread->wake.notify_one();
  ended.splice(ended.end(), threads);
  ended.splice(ended.end(), left);
}

// --- Executor ---

Executor::Executor(OnEscape on_escape, const ExecutorOptions& options)
    : impl_(std::make_unique<Impl>(std::move(on_escape), options)) {}

Executor::~Executor() {
  if (impl_->forked()) {
    static_cast<void>(impl_.release());  // its threads are not here, and one of them may have had the lock
    return;
  }
  close();
}

int Executor::threads() const {
  const std::lock_guard lock(impl_->mutex);
  return static_cast<int>(impl_->threads.size());
}

int Executor::threads_max() const {
  const std::lock_guard lock(impl_->mutex);
  int most = impl_->options.shared;
  for (const Class* of : impl_->classes) most += of->limits.reserved;
  return most;
}

void Executor::close() noexcept {
  if (!impl_->forked()) impl_->close();
}

// --- TaskClass ---

TaskClass::TaskClass(Executor& executor, TaskLimits limits)
    : executor_(*executor.impl_), class_(std::make_unique<Executor::Class>(limits)) {
  KVPOOL_CHECK(limits.reserved >= 1 && limits.most >= limits.reserved);
  const std::lock_guard lock(executor_.mutex);
  class_->stopped = executor_.closing;
  executor_.classes.push_back(class_.get());
}

TaskClass::~TaskClass() {
  if (executor_.forked()) {
    static_cast<void>(class_.release());
    return;
  }
  stop();
  const std::lock_guard lock(executor_.mutex);
  std::erase(executor_.classes, class_.get());
}

void TaskClass::run(std::uint64_t peer, Priority priority, Task task) {
  if (executor_.forked()) throw Error(ErrorCode::kFork, "the threads of this pool belong to the parent process");
  if (!executor_.give(*class_, task, /*may_wait=*/true, peer, priority)) run_here(task);
}

bool TaskClass::try_run(Task task) noexcept {
  return !executor_.forked() && executor_.give(*class_, task, /*may_wait=*/false, 0, Priority::kDecode);
}

bool TaskClass::run_later(Priority priority, Task task) noexcept {
  const std::lock_guard lock(executor_.mutex);
  if (class_->running == 0) return false;  // stopped, and the caller is no thread of the executor (E5)
  try {
    class_->queue.add(0, priority, std::move(task));
  } catch (const std::bad_alloc&) {
    return false;
  }
  class_->waiting.store(class_->queue.size(), std::memory_order_relaxed);
  return true;
}

void TaskClass::run_here(const Task& task) noexcept { executor_.run_escaping(task); }

std::size_t TaskClass::waiting() const noexcept { return class_->waiting.load(std::memory_order_relaxed); }

void TaskClass::stop() noexcept {
  if (!executor_.forked()) executor_.stop(*class_);
}

}  // namespace kvpool
