#include "kvpool/exec/serial_executor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "failing_alloc.h"

namespace kvpool {
namespace {

TEST_CASE("work of one key runs in order, one piece at a time, and does not delay other keys") {
  Executor executor;
  SerialExecutor serial_executor(executor);
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

TEST_CASE("keys take turns when more of them have work than there are threads") {
  Executor executor;
  SerialExecutor serial_executor(executor, {1, 1});
  const int keys[2] = {};
  std::promise<void> begun;
  std::promise<void> go;
  std::string order;  // of one thread
  serial_executor.run(&keys[0], Priority::kPrefill, [&] {
    begun.set_value();
    go.get_future().wait();
  });
  begun.get_future().wait();
  for (const char name : {'a', 'b', 'c'})
    serial_executor.run(&keys[0], Priority::kPrefill, [&, name] { order += name; });
  serial_executor.run(&keys[1], Priority::kPrefill, [&] { order += 'x'; });
  go.set_value();
  serial_executor.stop();
  CHECK(order == "xabc");
}

TEST_CASE("a key that waits for a thread overtakes others when more urgent work is added to it") {
  Executor executor;
  SerialExecutor serial_executor(executor, {1, 1});
  const int keys[3] = {};
  std::promise<void> begun;
  std::promise<void> go;
  std::string order;  // of one thread
  serial_executor.run(&keys[0], Priority::kPrefill, [&] {
    begun.set_value();
    go.get_future().wait();
  });
  begun.get_future().wait();
  const auto add = [&](int key, Priority priority, char name) {
    serial_executor.run(&keys[key], priority, [&order, name] { order += name; });
  };
  add(1, Priority::kBackground, 'c');
  add(2, Priority::kPrefill, 'b');
  add(1, Priority::kDecode, 'a');
  add(1, Priority::kBackground, 'd');
  go.set_value();
  serial_executor.stop();
  CHECK(order == "abcd");
}

// Each move up used to leave a task behind that found nothing to do, and waited as long as its urgency let it.
TEST_CASE("a key that moves up again and again has at most one task of each urgency") {
  Executor executor;
  SerialExecutor serial_executor(executor, {1, 1});
  const int keys[2] = {};
  std::vector<std::promise<void>> begun(21);
  std::vector<std::promise<void>> go(21);
  int background = 0;
  int urgent = 0;
  const auto stand_still = [&](std::size_t round) {
    serial_executor.run(&keys[0], Priority::kPrefill, [&, round] {
      begun[round].set_value();
      go[round].get_future().wait();
    });
  };
  stand_still(0);
  for (std::size_t round = 0; round < 20; ++round) {
    begun[round].get_future().wait();  // the only thread
    serial_executor.run(&keys[1], Priority::kBackground, [&] { ++background; });
    serial_executor.run(&keys[1], Priority::kDecode, [&] { ++urgent; });
    CHECK(urgent == static_cast<int>(round));  // the decode work of the rounds before
    CHECK(background == 0);
    CHECK(serial_executor.waiting() <= 3);
    stand_still(round + 1);
    go[round].set_value();
  }
  begun[20].get_future().wait();
  go[20].set_value();
  serial_executor.stop();
  CHECK(urgent == 20);
  CHECK(background == 20);
}

TEST_CASE("keys of any urgency: each piece runs once, in order, and one at a time for its key") {
  Executor executor;
  SerialExecutor serial_executor(executor, {1, 2});
  constexpr int kKeys = 5;
  constexpr int kPieces = 2000;
  struct {
    std::atomic<int> running{0};
    std::vector<int> done[3];
  } keys[kKeys];
  std::mt19937 dice(7);
  int given[kKeys][3] = {};
  for (int i = 0; i < kPieces; ++i) {
    const int key = static_cast<int>(dice() % kKeys);
    const int priority = static_cast<int>(dice() % 3);
    serial_executor.run(&keys[key], static_cast<Priority>(priority),
                        [&one = keys[key], priority, number = given[key][priority]++] {
                          if (++one.running != 1) std::abort();
                          one.done[priority].push_back(number);
                          --one.running;
                        });
  }
  serial_executor.stop();
  for (int key = 0; key < kKeys; ++key) {
    for (int priority = 0; priority < 3; ++priority) {
      const std::vector<int>& done = keys[key].done[priority];
      CHECK(done.size() == static_cast<std::size_t>(given[key][priority]));
      CHECK(std::ranges::is_sorted(done));
    }
  }
}

// A caller that was about to hand over a more urgent task once counted as one that had, and others left their work to a
// task that then could not be queued, because every thread had left meanwhile.
TEST_CASE("work that several threads give for one key is done without stop()") {
  constexpr int kGivers = 4;
  constexpr int kRounds = 3000;
  Executor executor;
  SerialExecutor serial_executor(executor, {1, 1});
  const int key = 0;
  std::array<std::atomic<int>, kGivers> done{};
  std::atomic<int> round{0};
  std::atomic<bool> lost{false};
  const auto wait_for = [&](const std::atomic<int>& count, int least) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (count < least && !lost) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > until) lost = true;
    }
  };
  {
    std::vector<std::jthread> givers;
    for (std::size_t giver = 0; giver < kGivers; ++giver) {
      givers.emplace_back([&, giver] {
        const auto priority = static_cast<Priority>(giver % 3);
        for (int i = 1; i <= kRounds && !lost; ++i) {
          serial_executor.run(&key, priority, [&one = done[giver]] { ++one; });
          wait_for(done[giver], i);
          ++round;
          wait_for(round, i * kGivers);  // so that the threads of the executor find nothing to do now and then
        }
      });
    }
  }
  CHECK_FALSE(lost);
  for (const auto& one : done) CHECK(one == kRounds);
}

TEST_CASE("when memory runs out, work is not done and its giver told so, or it is done once") {
  for (const Priority before : {Priority::kPrefill, Priority::kBackground}) {
    const int threw = testing::fail_each_allocation([&](auto&& fail) {
      Executor executor;
      SerialExecutor serial_executor(executor, {1, 1});
      const int keys[2] = {};
      std::promise<void> begun;
      std::promise<void> go;
      int earlier = 0;
      int ran = 0;
      serial_executor.run(&keys[0], Priority::kPrefill, [&] {
        begun.set_value();
        go.get_future().wait();
      });
      begun.get_future().wait();
      if (before == Priority::kBackground) serial_executor.run(&keys[1], before, [&] { ++earlier; });
      Task work = [&] { ++ran; };
      const bool thrown = fail([&] { serial_executor.run(&keys[1], Priority::kDecode, std::move(work)); });
      const int expected = thrown ? 0 : 1;
      go.set_value();
      std::promise<void> after;
      serial_executor.run(&keys[1], Priority::kBackground, [&] { after.set_value(); });
      after.get_future().wait();
      CHECK(ran == expected);
      CHECK(earlier == (before == Priority::kBackground ? 1 : 0));
      serial_executor.stop();
      serial_executor.run(&keys[1], Priority::kDecode, [&] { ++ran; });  // no task is awaited that does not exist
      CHECK(ran == expected + 1);
    });
    CHECK((threw > 0) == (before == Priority::kPrefill));  // a key that waits already has memory for more
  }
}

TEST_CASE("a key that cannot go behind others for want of memory goes on at once") {
  int nth = 0;
  for (bool more = true; more;) {
    ++nth;
    Executor executor;
    SerialExecutor serial_executor(executor, {1, 1});
    const int keys[2] = {};
    std::promise<void> begun;
    std::promise<void> go;
    std::optional<testing::FailNthAllocation> failure;  // made and destroyed by the one thread
    std::string order;
    const auto piece = [&](char name) {
      if (failure) more = failure->failed_one();
      failure.reset();
      order += name;
    };
    serial_executor.run(&keys[0], Priority::kPrefill, [&] {
      begun.set_value();
      go.get_future().wait();
      failure.emplace(nth);
    });
    begun.get_future().wait();
    serial_executor.run(&keys[0], Priority::kPrefill, [&] { piece('a'); });
    serial_executor.run(&keys[1], Priority::kDecode, [&] { piece('x'); });
    go.set_value();
    serial_executor.stop();
    CHECK(order == (more ? "ax" : "xa"));
  }
  CHECK(nth > 1);
}

TEST_CASE("work that throws ends, and the rest of its key's work is done") {
  std::vector<ErrorCode> told;
  Executor executor([&](const Error& error) { told.push_back(error.code()); });
  SerialExecutor serial_executor(executor);
  const int key = 0;
  std::promise<void> ran;
  serial_executor.run(&key, Priority::kPrefill, [] { throw Error(ErrorCode::kPeerLost, "gone"); });
  serial_executor.run(&key, Priority::kPrefill, [&] { ran.set_value(); });
  ran.get_future().wait();
  serial_executor.stop();
  CHECK(told == std::vector{ErrorCode::kPeerLost});
}

TEST_CASE("work that is added after the end runs in its caller's thread") {
  Executor executor;
  SerialExecutor serial_executor(executor);
  serial_executor.stop();
  int ran = 0;
  serial_executor.run(&ran, Priority::kPrefill, [&] { ++ran; });
  CHECK(ran == 1);
}

}  // namespace
}  // namespace kvpool
