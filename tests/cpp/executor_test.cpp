#include "kvpool/exec/executor.h"

#include <doctest/doctest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "child_process.h"
#include "failing_alloc.h"
#include "kvpool/base/event_loop.h"
#include "thrown.h"

namespace kvpool {
namespace {

// Tasks that tell that they have begun, and end when they are let go.
class HeldTasks {
 public:
  explicit HeldTasks(std::size_t n) : tasks_(n) {}
  ~HeldTasks() {
    go_all();
    while (running_ > 0) usleep(100);  // what a task that has begun still touches is here
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

void wait_for_threads(const Executor& executor, int count) {
  while (executor.threads() != count) usleep(100);  // a test that hangs is ended by its runner
}

TEST_CASE("a class runs no more tasks at once than its limit, and the others wait") {
  Executor executor;
  HeldTasks held(5);
  TaskClass tasks(executor, {1, 2});
  for (std::size_t i = 0; i < 5; ++i) tasks.run(Priority::kPrefill, held.task(i));
  held.wait_begun(0);
  held.wait_begun(1);
  CHECK(tasks.waiting() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    held.go(i);
    held.wait_begun(i + 2);
    CHECK(tasks.waiting() == 2 - i);
  }
  held.go_all();
  tasks.stop();
  CHECK(held.most() == 2);
  CHECK(executor.threads() == 2);
}

TEST_CASE("no class occupies threads that another has reserved, and classes share the rest in turns") {
  Executor executor({}, {.shared = 2});
  HeldTasks flood(8);
  HeldTasks few(3);
  TaskClass flooding(executor, {1, 64});
  TaskClass other(executor, {1, 64});
  CHECK(executor.threads_max() == 4);
  for (std::size_t i = 0; i < 8; ++i) flooding.run(Priority::kDecode, flood.task(i));
  for (std::size_t i = 0; i < 3; ++i) flood.wait_begun(i);
  CHECK(flooding.waiting() == 5);  // one is reserved, two are shared
  other.run(Priority::kBackground, few.task(0));
  few.wait_begun(0);  // although the others are many, and more urgent
  other.run(Priority::kBackground, few.task(1));
  CHECK(other.waiting() == 1);
  CHECK(executor.threads() == 4);
  flood.go(0);
  flood.go(1);
  few.wait_begun(1);  // of two shared threads that became free, one is for it
  CHECK(flood.count_begun() <= 4);
  flood.go_all();
  few.go_all();
  flooding.stop();
  other.stop();
  CHECK(flood.most() <= 3);
  CHECK(executor.threads() == 4);
}

TEST_CASE("a task whose class has a thread never waits for a task of another class") {
  Executor executor({}, {.shared = 1});
  HeldTasks held(3);
  HeldTasks one(1);
  TaskClass first(executor, {1, 3});
  TaskClass second(executor, {1, 3});
  for (std::size_t i = 0; i < 3; ++i) first.run(Priority::kPrefill, held.task(i));
  held.wait_begun(1);
  held.go(0);  // its thread takes the third
  held.wait_begun(2);
  second.run(Priority::kPrefill, one.task(0));
  one.wait_begun(0);
  held.go(1);
  held.go(2);
  first.stop();  // although the second class's still runs
  CHECK(one.has_begun(0));
  one.go(0);
}

TEST_CASE("stop runs pending tasks in order, and later ones run in their caller's thread") {
  Executor executor;
  HeldTasks held(1);
  std::vector<int> order;  // of one thread
  TaskClass tasks(executor, {1, 1});
  tasks.run(Priority::kPrefill, held.task(0));
  for (int i = 0; i < 10; ++i) tasks.run(Priority::kPrefill, [&order, i] { order.push_back(i); });
  tasks.run(Priority::kDecode, [&order] { order.push_back(-1); });
  held.wait_begun(0);
  std::thread stopping([&] { tasks.stop(); });
  held.go(0);
  stopping.join();
  REQUIRE(order.size() == 11);
  CHECK(order[0] == -1);
  for (int i = 0; i < 10; ++i) CHECK(order[static_cast<std::size_t>(i) + 1] == i);
  std::thread::id ran_in;
  tasks.run(Priority::kBackground, [&] { ran_in = std::this_thread::get_id(); });
  CHECK(ran_in == std::this_thread::get_id());
  tasks.stop();
}

TEST_CASE("close ends every class and every thread") {
  auto executor = std::make_unique<Executor>();
  HeldTasks held(3);
  std::atomic<int> ran{0};
  TaskClass first(*executor, {1, 1});
  TaskClass second(*executor, {2, 2});
  first.run(Priority::kPrefill, held.task(0));
  second.run(Priority::kPrefill, held.task(1));
  second.run(Priority::kPrefill, held.task(2));
  for (int i = 0; i < 5; ++i) first.run(Priority::kPrefill, [&] { ++ran; });
  for (int i = 0; i < 5; ++i) second.run(Priority::kPrefill, [&] { ++ran; });
  std::thread closing([&] { executor->close(); });
  held.go_all();
  closing.join();
  CHECK(ran == 10);
  CHECK(executor->threads() == 0);
  first.run(Priority::kPrefill, [&] { ++ran; });
  CHECK(ran == 11);
  CHECK_FALSE(second.try_run([&] { ++ran; }));
  executor->close();
  TaskClass late(*executor, {1, 1});
  late.run(Priority::kPrefill, [&] { ++ran; });
  CHECK(ran == 12);
  CHECK(executor->threads() == 0);
}

TEST_CASE("an exception ends only the task that throws it, and is reported") {
  std::vector<Error> told;  // of one thread at a time
  Executor executor([&](const Error& error) {
    told.push_back(error);
    throw std::runtime_error("this, too, goes nowhere");
  });
  TaskClass tasks(executor, {1, 1});
  std::promise<void> ran;
  tasks.run(Priority::kPrefill, [] { throw Error(ErrorCode::kPeerLost, "gone"); });
  tasks.run(Priority::kPrefill, [] { throw std::bad_alloc(); });
  tasks.run(Priority::kPrefill, [&] { ran.set_value(); });
  ran.get_future().wait();
  CHECK(executor.threads() == 1);
  tasks.stop();
  tasks.run(Priority::kPrefill, [] { throw Error(ErrorCode::kDeadline, "late"); });
  REQUIRE(told.size() == 3);
  CHECK(told[0].code() == ErrorCode::kPeerLost);
  CHECK(told[1].code() == ErrorCode::kState);
  CHECK(told[2].code() == ErrorCode::kDeadline);
}

TEST_CASE("tasks submit tasks to their own class and to another") {
  Executor executor;
  constexpr int kTasks = 2000;
  TaskClass one(executor, {1, 1});
  TaskClass two(executor, {1, 2});
  std::atomic<int> ran{0};
  std::promise<void> all;
  std::function<void(int)> step = [&](int i) {
    if (++ran == kTasks) return all.set_value();
    (i % 3 == 0 ? two : one).run(Priority::kPrefill, [&, i] { step(i + 1); });
  };
  one.run(Priority::kPrefill, [&] { step(0); });
  all.get_future().wait();
  one.stop();
  two.stop();
  CHECK(ran == kTasks);
}

TEST_CASE("a task can queue another behind the pending ones, even while its class stops") {
  Executor executor;
  HeldTasks held(1);
  std::vector<int> order;  // of one thread
  TaskClass tasks(executor, {1, 1});
  const Task hold = held.task(0);
  tasks.run(Priority::kPrefill, [&] {
    hold();
    CHECK(tasks.run_later(Priority::kPrefill, [&] { order.push_back(2); }));
  });
  tasks.run(Priority::kPrefill, [&] { order.push_back(1); });
  std::thread stopping([&] { tasks.stop(); });
  held.go(0);
  stopping.join();
  CHECK(order == std::vector<int>{1, 2});
  CHECK_FALSE(tasks.run_later(Priority::kPrefill, [&] { order.push_back(3); }));  // nothing would look at it
  CHECK(tasks.waiting() == 0);
}

TEST_CASE("try_run runs a task in another thread at once, or not at all") {
  Executor executor({}, {.shared = 0});
  HeldTasks held(2);
  TaskClass tasks(executor, {1, 2});
  CHECK(tasks.try_run(held.task(0)));
  held.wait_begun(0);
  CHECK_FALSE(tasks.try_run(held.task(1)));
  CHECK(tasks.waiting() == 0);
  held.go(0);
  tasks.stop();
  CHECK_FALSE(tasks.try_run(held.task(1)));
  CHECK_FALSE(held.has_begun(1));
}

TEST_CASE("many threads submit tasks of many classes, and no limit is exceeded") {
  constexpr std::size_t kClasses = 4;
  constexpr int kSubmitters = 6;
  constexpr int kEach = 2000;
  constexpr std::array<TaskLimits, kClasses> kLimits{{{1, 1}, {1, 3}, {2, 2}, {1, 8}}};
  std::array<std::atomic<int>, kClasses> running{};
  std::atomic<int> wrong{0};
  std::atomic<int> ran{0};
  Executor executor({}, {.shared = 3});
  std::vector<std::unique_ptr<TaskClass>> classes;
  for (const TaskLimits limits : kLimits) classes.push_back(std::make_unique<TaskClass>(executor, limits));
  std::vector<std::thread> submitters;
  for (int s = 0; s < kSubmitters; ++s) {
    submitters.emplace_back([&, s] {
      for (int i = 0; i < kEach; ++i) {
        const std::size_t of = static_cast<std::size_t>(s + i) % kClasses;
        classes[of]->run(static_cast<std::uint64_t>(s), static_cast<Priority>(i % 3), [&, of] {
          if (++running[of] > kLimits[of].most) ++wrong;
          ++ran;
          --running[of];
        });
        if (i % 64 == 0 && executor.threads() > executor.threads_max()) ++wrong;
      }
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  for (const auto& of : classes) of->stop();
  CHECK(wrong == 0);
  CHECK(ran == kSubmitters * kEach);
  CHECK(executor.threads() <= executor.threads_max());
}

TEST_CASE("objects that a task kept alive are gone before its class has stopped") {
  Executor executor;
  TaskClass tasks(executor, {1, 1});
  auto kept = std::make_shared<int>(0);
  const std::weak_ptr<int> seen = kept;
  tasks.run(Priority::kPrefill, [kept = std::move(kept)] { ++*kept; });
  tasks.stop();
  CHECK(seen.expired());
}

TEST_CASE("idle threads end, and new ones start when there is work again") {
  Executor executor({}, {.linger = std::chrono::milliseconds(1), .stay = 0});
  TaskClass tasks(executor, {1, 4});
  for (int round = 0; round < 10; ++round) {
    HeldTasks held(4);
    for (std::size_t i = 0; i < 4; ++i) tasks.run(Priority::kPrefill, held.task(i));
    for (std::size_t i = 0; i < 4; ++i) held.wait_begun(i);
    CHECK(executor.threads() == 4);
    held.go_all();
    if (round % 2 == 0) wait_for_threads(executor, 0);
  }
}

TEST_CASE("the threads that are kept while idle do not end") {
  Executor executor({}, {.linger = std::chrono::milliseconds(1), .stay = 2});
  TaskClass tasks(executor, {1, 5});
  for (int round = 0; round < 3; ++round) {
    HeldTasks held(5);
    for (std::size_t i = 0; i < 5; ++i) tasks.run(Priority::kPrefill, held.task(i));
    for (std::size_t i = 0; i < 5; ++i) held.wait_begun(i);
    held.go_all();
    wait_for_threads(executor, 2);
    usleep(5000);  // longer than others are idle
    CHECK(executor.threads() == 2);
  }
}

TEST_CASE("neither the end of a thread nor the end of the executor needs memory") {
  Executor executor({}, {.linger = std::chrono::milliseconds(1), .stay = 0});
  TaskClass tasks(executor, {1, 1});
  tasks.run(Priority::kPrefill, [] {
    static thread_local std::unique_ptr<testing::FailNthAllocation> failure;
    failure = std::make_unique<testing::FailNthAllocation>(1);
  });
  wait_for_threads(executor, 0);
  const testing::FailNthAllocation failure(1);
  tasks.stop();
  executor.close();
}

TEST_CASE("when a thread cannot be started for lack of memory, the caller's signal mask is restored") {
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  REQUIRE(sigismember(&before, SIGUSR2) == 0);
  testing::fail_each_allocation([](auto&& fail) {
    Executor executor;
    TaskClass tasks(executor, {1, 1});
    std::atomic<int> ran{0};
    const bool thrown = fail([&] { tasks.run(Priority::kPrefill, [&] { ++ran; }); });
    tasks.stop();
    CHECK(ran == (thrown ? 0 : 1));
    sigset_t after;
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    CHECK(sigismember(&after, SIGUSR2) == 0);
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, SIGUSR2);
    pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
  });
}

TEST_CASE("a task that cannot be queued for lack of memory is left undone, and the others are intact") {
  const int threw = testing::fail_each_allocation([](auto&& fail) {
    Executor executor;
    HeldTasks held(1);
    TaskClass tasks(executor, {1, 1});
    tasks.run(Priority::kPrefill, held.task(0));
    std::atomic<int> ran{0};
    const bool thrown = fail([&] { tasks.run(7, Priority::kPrefill, [&] { ++ran; }); });
    CHECK(tasks.waiting() == (thrown ? 0 : 1));
    held.go(0);
    tasks.stop();
    CHECK(ran == (thrown ? 0 : 1));
  });
  CHECK(threw > 0);
}

TEST_CASE("a caller does the work itself when no thread can be started, unless its class has one") {
  if (!test::kChildMayStartThreads) return;
  const int status = test::run_in_child([] {
    Executor executor;
    HeldTasks held(1);
    TaskClass served(executor, {1, 4});
    TaskClass alone(executor, {1, 4});
    served.run(Priority::kPrefill, held.task(0));
    held.wait_begun(0);
    if (!test::refuse_calls({{.number = SYS_clone3, .error = EAGAIN}, {.number = SYS_clone, .error = EAGAIN}})) {
      return test::kChildSkipped;
    }
    std::thread::id ran_in;
    alone.run(Priority::kPrefill, [&] { ran_in = std::this_thread::get_id(); });
    const bool here = ran_in == std::this_thread::get_id();
    served.run(Priority::kPrefill, [&] { ran_in = std::this_thread::get_id(); });
    const bool waits = served.waiting() == 1;
    std::thread::id left_to;
    in_event_loop = true;
    alone.run(Priority::kPrefill, [&] { left_to = std::this_thread::get_id(); });
    in_event_loop = false;
    const bool left = alone.waiting() == 1;
    held.go(0);
    served.stop();
    alone.stop();
    const std::thread::id here_id = std::this_thread::get_id();
    return here && waits && left && ran_in != here_id && left_to != here_id && left_to != std::thread::id() ? 0 : 1;
  });
  CHECK((status == 0 || status == test::kChildSkipped));
}

TEST_CASE("threads block all signals, and submitting a task leaves the caller's signal mask alone") {
  Executor executor;
  TaskClass tasks(executor, {1, 1});
  std::promise<sigset_t> of_thread;
  tasks.run(Priority::kPrefill, [&] {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    of_thread.set_value(mask);
  });
  const sigset_t mask = of_thread.get_future().get();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM, SIGPROF}) {
    CHECK(sigismember(&mask, signal) == 1);
  }
  sigset_t own;
  pthread_sigmask(SIG_SETMASK, nullptr, &own);
  CHECK(sigismember(&own, SIGINT) == 0);
}

TEST_CASE("a forked child gets an error, and ends without the parent's threads and locks") {
  auto executor = std::make_unique<Executor>();
  auto tasks = std::make_unique<TaskClass>(*executor, TaskLimits{1, 1});
  HeldTasks held(1);
  tasks->run(Priority::kPrefill, held.task(0));
  held.wait_begun(0);
  const int status = test::run_in_child([&] {
    alarm(30);
    const auto code = testing::code_of([&] { tasks->run(Priority::kPrefill, [] {}); });
    if (code != ErrorCode::kFork || tasks->try_run([] {})) return 1;
    tasks->stop();
    tasks.reset();
    executor->close();
    executor.reset();
    return 0;
  });
  CHECK(status == 0);
  std::promise<void> ran;
  tasks->run(Priority::kPrefill, [&] { ran.set_value(); });
  held.go(0);
  ran.get_future().wait();
}

}  // namespace
}  // namespace kvpool
