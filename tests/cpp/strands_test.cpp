#include "kvpool/pool/strands.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

namespace kvpool {
namespace {

TEST_CASE("work of one key runs in order, one piece at a time, and keeps no other key waiting") {
  Strands strands;
  const int keys[2] = {};
  std::promise<void> go;
  const std::shared_future<void> gate(go.get_future());
  std::atomic<int> running{0};
  std::vector<int> order;
  std::promise<void> other;
  std::promise<void> begun;
  strands.run(&keys[0], Priority::kPrefill, [&] {
    begun.set_value();
    gate.wait();
  });
  begun.get_future().wait();
  for (int i = 0; i < 20; ++i) {
    strands.run(&keys[0], Priority::kPrefill, [&, i] {
      CHECK(++running == 1);
      order.push_back(i);
      --running;
    });
  }
  strands.run(&keys[0], Priority::kDecode, [&] { order.push_back(-1); });
  strands.run(&keys[1], Priority::kBackground, [&] { other.set_value(); });
  other.get_future().wait();  // although the first key stands still
  CHECK(order.empty());
  go.set_value();
  strands.stop();
  REQUIRE(order.size() == 21);
  CHECK(order[0] == -1);  // the more urgent first
  for (int i = 0; i < 20; ++i) CHECK(order[static_cast<std::size_t>(i) + 1] == i);
}

TEST_CASE("threads that have nothing to do end, and others begin when there is work again") {
  Workers workers(4, std::chrono::milliseconds(1));
  for (int round = 0; round < 20; ++round) {
    std::promise<void> ran;
    workers.run(Priority::kPrefill, [&] { ran.set_value(); });
    ran.get_future().wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 2 == 0 ? 5 : 0));
  }
  workers.stop();
}

TEST_CASE("what comes after the end runs in its caller's thread") {
  Strands strands;
  strands.stop();
  int ran = 0;
  strands.run(&ran, Priority::kPrefill, [&] { ++ran; });
  CHECK(ran == 1);
}

}  // namespace
}  // namespace kvpool
