// Classes of tasks: their limits, their order, and how they end.
#include "kvpool/exec/executor.h"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "held_tasks.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

using testing::HeldTasks;

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

}  // namespace
}  // namespace kvpool
