#include "kvpool/peers/single_flight.h"

#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "service_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr int kCallers = 6;

// Callers that all want "peer". The first attempt lasts until the others had time to come.
std::vector<std::optional<Error>> call_together(SingleFlight& attempts, const Waiting& first, const Waiting& others,
                                                const std::function<void(int call)>& attempt) {
  std::atomic<int> calls{0};
  std::atomic<bool> begun{false};
  std::vector<std::optional<Error>> outcomes(kCallers);
  std::vector<std::thread> callers;
  const auto call = [&](int i, const Waiting& waiting) {
    outcomes[static_cast<std::size_t>(i)] = error_of([&] {
      attempts.run("peer", waiting, [&] {
        begun = true;
        attempt(++calls);
      });
    });
  };
  callers.emplace_back([&] { call(0, first); });
  CHECK(soon([&] { return begun.load(); }));
  for (int i = 1; i < kCallers; ++i) callers.emplace_back([&, i] { call(i, others); });
  for (std::thread& caller : callers) caller.join();
  return outcomes;
}

TEST_CASE("callers that want the same thing share one attempt and its outcome") {
  for (const bool works : {true, false}) {
    SingleFlight attempts;
    std::atomic<int> made{0};
    const auto outcomes = call_together(attempts, in_seconds(30), in_seconds(30), [&](int call) {
      made = call;
      if (call == 1) usleep(500'000);
      if (!works) throw Error(ErrorCode::kAuth, "attempt " + std::to_string(call));
    });
    CHECK(made < kCallers);  // mostly 1: a caller that comes when it is over makes another
    for (const auto& outcome : outcomes) {
      CHECK(outcome.has_value() != works);
      if (outcome) CHECK(outcome->code() == ErrorCode::kAuth);
    }
  }
}

TEST_CASE("an attempt whose caller gave up, or came too late, is repeated by another caller") {
  for (const bool late : {true, false}) {
    SingleFlight attempts;
    std::atomic<int> made{0};
    const auto outcomes = call_together(attempts, late ? in_seconds(0.05) : in_seconds(30), in_seconds(30), [&](int n) {
      made = n;
      if (n > 1) return;
      usleep(100'000);
      throw Error(late ? ErrorCode::kPeerLost : ErrorCode::kCancelled, "the first");
    });
    CHECK(made >= 2);
    CHECK(outcomes[0]);
    for (int i = 1; i < kCallers; ++i) CHECK_FALSE(outcomes[static_cast<std::size_t>(i)]);
  }
}

TEST_CASE("a caller that waits for another's attempt keeps its deadline, and may give up") {
  SingleFlight attempts;
  std::atomic<bool> go{false};
  std::atomic<bool> begun{false};
  std::thread leader([&] {
    attempts.run("peer", in_seconds(60), [&] {
      begun = true;
      CHECK(soon([&] { return go.load(); }));
    });
  });
  CHECK(soon([&] { return begun.load(); }));
  const auto never = [] { FAIL("another attempt"); };
  CHECK(code_of([&] { attempts.run("peer", in_seconds(0.05), never); }) == ErrorCode::kPeerLost);
  CHECK(code_of([&] { attempts.run("peer", {in_seconds(60), [] { return true; }}, never); }) == ErrorCode::kCancelled);
  bool other = false;
  attempts.run("another", in_seconds(1), [&] { other = true; });
  CHECK(other);
  go = true;
  leader.join();
}

}  // namespace
}  // namespace kvpool::testing
