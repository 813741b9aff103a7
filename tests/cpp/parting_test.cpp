// The progression of a parting: each state once, in order, however threads race.
#include "kvpool/transfer/parting.h"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

using kvpool::Parting;
using kvpool::PartingState;

namespace {

constexpr std::array kStates{PartingState::kOpen,    PartingState::kStopping,  PartingState::kSaying,
                             PartingState::kDrained, PartingState::kLinkEnded, PartingState::kSettled};

}  // namespace

TEST_CASE("a parting begins open, and passes through its states in order") {
  Parting parting;
  CHECK(parting.reached(PartingState::kOpen));
  for (std::size_t i = 1; i < kStates.size(); ++i) {
    CHECK_FALSE(parting.reached(kStates[i]));
    CHECK(parting.advance(kStates[i]));
    CHECK(parting.reached(kStates[i]));
    CHECK(parting.reached(kStates[i - 1]));
  }
}

TEST_CASE("a parting never goes back and never reaches a state twice") {
  for (std::size_t at = 0; at < kStates.size(); ++at) {
    for (std::size_t to = 0; to <= at; ++to) {
      Parting parting;
      parting.advance(kStates[at]);
      CHECK_FALSE(parting.advance(kStates[to]));
      CHECK(parting.reached(kStates[at]));
      if (at + 1 < kStates.size()) CHECK_FALSE(parting.reached(kStates[at + 1]));
    }
  }
}

TEST_CASE("a broken link skips the states that were not announced, and they are never announced later") {
  Parting parting;
  CHECK(parting.advance(PartingState::kLinkEnded));
  CHECK(parting.reached(PartingState::kStopping));
  CHECK_FALSE(parting.advance(PartingState::kSaying));
  CHECK_FALSE(parting.advance(PartingState::kDrained));
  CHECK(parting.advance(PartingState::kSettled));
}

TEST_CASE("of several threads that advance to the same state, only one learns that it did") {
  constexpr int kThreads = 4;
  for (int round = 0; round < 200; ++round) {
    Parting parting;
    std::array<std::atomic<int>, kStates.size()> told{};
    std::atomic<int> ready{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        ready.fetch_add(1);
        while (ready.load() < kThreads) {
        }
        for (std::size_t i = 1; i < kStates.size(); ++i) {
          if (parting.advance(kStates[i])) told[i].fetch_add(1);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 1; i < kStates.size(); ++i) CHECK(told[i].load() <= 1);
    CHECK(told.back().load() == 1);
    CHECK(parting.reached(PartingState::kSettled));
  }
}

// As a session counts its writes: the last write that ends after the link, or the link that ends after the last write,
// lets go; if neither did, what the link keeps would stay open forever.
TEST_CASE("the last write and the link may end in any order, or at once, and both ends are noticed") {
  for (int round = 0; round < 500; ++round) {
    Parting parting;
    std::atomic<int> writes{1};
    std::atomic<int> ready{0};
    std::atomic<int> let_go{0};
    const auto meet = [&] {
      ready.fetch_add(1);
      while (ready.load() < 2) {
      }
    };
    std::thread writer([&] {
      meet();
      writes.fetch_sub(1);
      if (parting.reached(PartingState::kLinkEnded)) let_go.fetch_add(1);
    });
    std::thread link([&] {
      meet();
      parting.advance(PartingState::kLinkEnded);
      if (writes.load() == 0) let_go.fetch_add(1);
    });
    writer.join();
    link.join();
    CHECK(let_go.load() >= 1);
  }
}
