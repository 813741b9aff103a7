// Which key's work comes next, beside a naive model, and threads that take it.
#include "kvpool/exec/fair_queue.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "failing_alloc.h"
#include "fuzz_seeds.h"
#include "kvpool/exec/executor.h"

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kA = 1;
constexpr std::uint64_t kB = 2;
constexpr std::uint64_t kC = 3;

struct Noted {
  FairQueue shares;
  std::string ran;

  void add(std::uint64_t peer, Priority priority, char name) {
    shares.add(peer, priority, [this, name] { ran += name; });
  }
  std::string take(std::size_t n) {
    ran.clear();
    for (std::size_t i = 0; i < n; ++i) shares.take()();
    return ran;
  }
};

TEST_CASE("peers take turns, however much work one of them has queued") {
  Noted noted;
  for (const char name : {'a', 'b', 'c', 'd'}) noted.add(kA, Priority::kPrefill, name);
  noted.add(kB, Priority::kPrefill, 'x');
  noted.add(kC, Priority::kPrefill, '1');
  noted.add(kC, Priority::kPrefill, '2');
  CHECK(noted.take(4) == "ax1b");
  noted.add(kB, Priority::kPrefill, 'y');  // comes again: behind the waiting keys
  CHECK(noted.take(4) == "2cyd");
  CHECK(noted.shares.size() == 0);
  CHECK_FALSE(noted.shares.take());
}

TEST_CASE("the most urgent work comes before the turns of keys") {
  Noted noted;
  noted.add(kA, Priority::kBackground, 'a');
  noted.add(kA, Priority::kPrefill, 'b');
  noted.add(kB, Priority::kPrefill, 'x');
  CHECK(noted.take(1) == "b");
  noted.add(kA, Priority::kDecode, 'c');
  noted.add(kA, Priority::kDecode, 'd');
  noted.add(kB, Priority::kDecode, 'y');
  CHECK(noted.take(5) == "cydxa");
}

TEST_CASE("work that cannot be queued for lack of memory costs no key its turn") {
  const int threw = fail_each_allocation([](auto&& fail) {
    Noted noted;
    noted.add(kA, Priority::kPrefill, 'a');
    noted.add(kA, Priority::kPrefill, 'b');
    const bool failed = fail([&] { noted.shares.add(kB, Priority::kPrefill, [&noted] { noted.ran += 'x'; }); });
    CHECK(noted.shares.size() == (failed ? 2 : 3));
    noted.add(kB, Priority::kPrefill, 'y');
    CHECK(noted.take(noted.shares.size()) == (failed ? "ayb" : "axby"));
  });
  CHECK(threw > 1);
}

// The waiting keys, in the order of turns, each with the numbers of its work.
using NaiveTurns = std::vector<std::pair<std::uint64_t, std::deque<int>>>;

TEST_CASE("a fair queue agrees with a naive model after every event") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("shares", seed);
    Dice dice(seed);
    FairQueue shares;
    std::array<NaiveTurns, 3> model;
    int ran = -1;
    for (int step = 0; step < fuzz_length(2000); ++step) {
      if (dice.below(100) < 55) {
        const std::uint64_t peer = dice.below(4);
        const auto priority = static_cast<Priority>(dice.below(3));
        NaiveTurns& turns = model[static_cast<std::size_t>(priority)];
        shares.add(peer, priority, [&ran, step] { ran = step; });
        auto entry = std::find_if(turns.begin(), turns.end(), [&](const auto& one) { return one.first == peer; });
        if (entry == turns.end()) entry = turns.insert(turns.end(), {peer, {}});
        entry->second.push_back(step);
      } else {
        const auto turns = std::find_if(model.begin(), model.end(), [](const auto& any) { return !any.empty(); });
        const FairQueue::Work work = shares.take();
        REQUIRE(static_cast<bool>(work) == (turns != model.end()));
        if (!work) continue;
        work();
        REQUIRE(ran == turns->front().second.front());
        turns->front().second.pop_front();
        std::rotate(turns->begin(), turns->begin() + 1, turns->end());
        if (turns->back().second.empty()) turns->pop_back();
      }
      std::size_t waiting = 0;
      for (const NaiveTurns& turns : model) {
        for (const auto& [peer, works] : turns) waiting += works.size();
      }
      REQUIRE(shares.size() == waiting);
    }
  }
}

TEST_CASE("the work of one peer waits only for what threads have begun of another's") {
  Executor executor;
  TaskClass workers(executor, {1, 1});
  std::promise<void> begun;
  std::promise<void> go;
  std::string order;  // of one thread
  workers.run(kA, Priority::kPrefill, [&] {
    begun.set_value();
    go.get_future().wait();
  });
  begun.get_future().wait();
  for (const char name : {'a', 'b', 'c'}) workers.run(kA, Priority::kPrefill, [&, name] { order += name; });
  workers.run(kB, Priority::kPrefill, [&] { order += 'x'; });
  go.set_value();
  workers.stop();
  CHECK(order == "axbc");
}

}  // namespace
}  // namespace kvpool::testing
