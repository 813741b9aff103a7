#include "kvpool/exec/serial_executor.h"

#include <doctest/doctest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "failing_alloc.h"

namespace kvpool {
namespace {

TEST_CASE("work of one key runs in order, one piece at a time, and keeps no other key waiting") {
  SerialExecutor serial_executor;
  const int keys[2] = {};
  std::promise<void> go;
  const std::shared_future<void> gate(go.get_future());
  std::atomic<int> running{0};
  std::vector<int> order;
  std::promise<void> other;
  std::promise<void> begun;
  serial_executor.run(&keys[0], Priority::kPrefill, [&] {
    begun.set_value();
    gate.wait();
  });
  begun.get_future().wait();
  for (int i = 0; i < 20; ++i) {
    serial_executor.run(&keys[0], Priority::kPrefill, [&, i] {
      CHECK(++running == 1);
      order.push_back(i);
      --running;
    });
  }
  serial_executor.run(&keys[0], Priority::kDecode, [&] { order.push_back(-1); });
  serial_executor.run(&keys[1], Priority::kBackground, [&] { other.set_value(); });
  other.get_future().wait();  // although the first key stands still
  CHECK(order.empty());
  go.set_value();
  serial_executor.stop();
  REQUIRE(order.size() == 21);
  CHECK(order[0] == -1);  // the more urgent first
  for (int i = 0; i < 20; ++i) CHECK(order[static_cast<std::size_t>(i) + 1] == i);
}

TEST_CASE("threads that have nothing to do end, and others begin when there is work again") {
  WorkerPool workers(4, std::chrono::milliseconds(1));
  for (int round = 0; round < 20; ++round) {
    std::promise<void> ran;
    workers.run(Priority::kPrefill, [&] { ran.set_value(); });
    ran.get_future().wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 2 == 0 ? 5 : 0));
  }
  workers.stop();
}

TEST_CASE("a thread that ends, and the end of all, need no memory") {
  WorkerPool workers(1, std::chrono::milliseconds(1));
  std::promise<void> ran;
  workers.run(Priority::kPrefill, [&] {
    static thread_local std::unique_ptr<testing::FailNthAllocation> failure;
    failure = std::make_unique<testing::FailNthAllocation>(1);
    ran.set_value();
  });
  ran.get_future().wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it has left, as a rule
  const testing::FailNthAllocation failure(1);
  workers.stop();
}

TEST_CASE("memory that runs out when a thread is to begin leaves the caller's signals as they were") {
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  REQUIRE(sigismember(&before, SIGUSR2) == 0);
  testing::fail_each_allocation([](auto&& fail) {
    WorkerPool workers(1);
    std::atomic<int> ran{0};
    const bool thrown = fail([&] { workers.run(Priority::kPrefill, [&] { ++ran; }); });
    workers.stop();
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

TEST_CASE("what comes after the end runs in its caller's thread") {
  SerialExecutor serial_executor;
  serial_executor.stop();
  int ran = 0;
  serial_executor.run(&ran, Priority::kPrefill, [&] { ++ran; });
  CHECK(ran == 1);
}

}  // namespace
}  // namespace kvpool
