// The threads of an executor: when they start and end, without memory, with signals, and after a fork.
#include <doctest/doctest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <thread>

#include "child_process.h"
#include "failing_alloc.h"
#include "held_tasks.h"
#include "kvpool/base/error.h"
#include "kvpool/base/event_loop.h"
#include "kvpool/exec/executor.h"
#include "thrown.h"

namespace kvpool {
namespace {

using testing::HeldTasks;
using testing::wait_for_threads;

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
