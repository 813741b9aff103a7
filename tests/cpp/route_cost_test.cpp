#include "kvpool/routes/route_cost.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

namespace kvpool {
namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;
constexpr RoutePrior kPrior{10, 1, 0.001};
constexpr MediaSet kHbm = media_set_of(Medium::kHbm);
constexpr MediaSet kDram = media_set_of(Medium::kDram);

TEST_CASE("a cost is its prior until a write was measured") {
  const RouteCost cost(kPrior);
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, 0) == doctest::Approx(12));
  CHECK(cost.estimate_us(kHbm, kHbm, {100, 100'000}, kSecondNs) == doctest::Approx(210));
}

TEST_CASE("a cost follows the times of writes of that size") {
  RouteCost cost(kPrior);
  std::int64_t now = 100 * kSecondNs;
  for (int i = 0; i < 40; ++i) {
    now += 1'000'000;
    cost.measured(kHbm, kHbm, {64, 64 * 4096}, 1000, now);
    cost.measured(kHbm, kHbm, {1, 4096}, 3, now);
  }
  CHECK(cost.estimate_us(kHbm, kHbm, {64, 64 * 4096}, now) == doctest::Approx(1000).epsilon(0.1));
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 4096}, now) == doctest::Approx(3).epsilon(0.1));
}

TEST_CASE("sizes that were not measured take the correction of those that were") {
  RouteCost cost(kPrior);
  const std::int64_t now = kSecondNs;
  for (int i = 0; i < 40; ++i) cost.measured(kHbm, kHbm, {1, 1 << 20}, 4 * (11 + 0.001 * (1 << 20)), now);
  CHECK(cost.estimate_us(kHbm, kHbm, {1000, 1000}, now) == doctest::Approx(4 * 1011).epsilon(0.1));
}

TEST_CASE("one outlier does not decide, and its effect fades") {
  RouteCost cost(kPrior);
  std::int64_t now = kSecondNs;
  for (int i = 0; i < 40; ++i) cost.measured(kHbm, kHbm, {1, 1000}, 12, now);
  cost.measured(kHbm, kHbm, {1, 1000}, 1e9, now);
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, now) < 2 * 12);
  for (int i = 0; i < 40; ++i) cost.measured(kHbm, kHbm, {1, 1000}, 100 * 12, now);
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, now) > 50 * 12);
  now += 60 * kSecondNs;
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, now) == doctest::Approx(12).epsilon(0.01));
}

TEST_CASE("senseless numbers change nothing") {
  RouteCost cost(kPrior);
  cost.measured(kHbm, kHbm, {1, 1000}, 0, kSecondNs);
  cost.measured(kHbm, kHbm, {1, 1000}, -5, kSecondNs);
  RouteCost free(RoutePrior{0, 0, 0});
  free.measured(kHbm, kHbm, {1, 1}, 100, kSecondNs);
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, kSecondNs) == doctest::Approx(12));
  CHECK(free.estimate_us(kHbm, kHbm, {1, 1}, kSecondNs) == 0);
  CHECK(cost.estimate_us(kHbm, kHbm, {0, 0}, kSecondNs) == doctest::Approx(10));
  CHECK(cost.estimate_us(kHbm, kHbm, {UINT64_MAX, UINT64_MAX}, kSecondNs) > 0);
}

TEST_CASE("threads may measure and estimate at once") {
  RouteCost cost(kPrior);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&cost] {
      for (int i = 1; i < 2000; ++i) {
        cost.measured(kHbm, kHbm, {4, 4096}, 30, i * 1'000'000LL);
        const double us = cost.estimate_us(kHbm, kHbm, {4, 4096}, i * 1'000'000LL);
        if (!(us > 0 && us < 1000)) std::abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(cost.estimate_us(kHbm, kHbm, {4, 4096}, 2 * kSecondNs) == doctest::Approx(30).epsilon(0.1));
}

TEST_CASE("a measurement replaces the guess between two media, and stays") {
  RouteCost cost(kPrior);
  const std::int64_t now = kSecondNs;
  for (int i = 0; i < 40; ++i) cost.measured(kHbm, kHbm, {1, 1000}, 120, now);
  CHECK_FALSE(cost.measured_prior(Medium::kHbm, Medium::kHbm));
  cost.set_prior(Medium::kHbm, Medium::kHbm, {50, 0, 0.01}, {5, 1, 0.04});
  // Corrections of the guess say nothing about it.
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, now) == doctest::Approx(106));
  CHECK(cost.estimate_us(kHbm, kDram, {1, 1000}, now) == doctest::Approx(120).epsilon(0.1));
  REQUIRE(cost.measured_prior(Medium::kHbm, Medium::kHbm));
  CHECK(cost.measured_prior(Medium::kHbm, Medium::kHbm)->us_per_byte == doctest::Approx(0.05));
  CHECK(cost.guess().latency_us == 10);
  for (int i = 0; i < 40; ++i) cost.measured(kHbm, kHbm, {1, 1000}, 600, now);
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, now) == doctest::Approx(646).epsilon(0.1));
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, now + 60 * kSecondNs) == doctest::Approx(106).epsilon(0.01));
  CHECK(cost.estimate_us(kHbm, kDram, {1, 1000}, now + 60 * kSecondNs) == doctest::Approx(12).epsilon(0.01));
}

TEST_CASE("a write between several pairs of media costs what the slowest does, and corrects neither") {
  RouteCost cost(kPrior);
  const MediaSet both{true, true};
  cost.set_prior(Medium::kHbm, Medium::kDram, {500, 0, 1});
  CHECK(cost.estimate_us(both, kDram, {1, 1000}, kSecondNs) == doctest::Approx(1500));
  for (int i = 0; i < 40; ++i) cost.measured(both, kDram, {1, 1000}, 3, kSecondNs);
  CHECK(cost.estimate_us(kHbm, kDram, {1, 1000}, kSecondNs) == doctest::Approx(1500));
  CHECK(cost.estimate_us(kDram, kDram, {1, 1000}, kSecondNs) == doctest::Approx(12));
  for (int i = 0; i < 40; ++i) cost.measured(both, kHbm, {1, 1000}, 24, kSecondNs);
  CHECK(cost.estimate_us(both, kHbm, {1, 1000}, kSecondNs) == doctest::Approx(24).epsilon(0.1));
}

TEST_CASE("pieces that must be calls have a cost and corrections apart, where that makes a difference") {
  const auto size = [](bool gather) { return WriteSize{100, 100'000, gather}; };
  RouteCost gathers(kPrior, 5);
  CHECK(gathers.estimate_us(kHbm, kHbm, size(true), kSecondNs) == doctest::Approx(210));
  CHECK(gathers.estimate_us(kHbm, kHbm, size(false), kSecondNs) == doctest::Approx(710));
  for (int i = 0; i < 40; ++i) gathers.measured(kHbm, kHbm, size(false), 1420, kSecondNs);
  CHECK(gathers.estimate_us(kHbm, kHbm, size(false), kSecondNs) == doctest::Approx(1420).epsilon(0.1));
  CHECK(gathers.estimate_us(kHbm, kHbm, size(true), kSecondNs) == doctest::Approx(210));
  gathers.set_prior(Medium::kHbm, Medium::kHbm, {0, 2, 0}, {7, 0, 0});
  CHECK(gathers.estimate_us(kHbm, kHbm, size(true), kSecondNs) == doctest::Approx(207));
  CHECK(gathers.estimate_us(kHbm, kHbm, size(false), kSecondNs) == doctest::Approx(707));
  RouteCost never(kPrior);
  for (int i = 0; i < 40; ++i) never.measured(kHbm, kHbm, size(false), 420, kSecondNs);
  CHECK(never.estimate_us(kHbm, kHbm, size(true), kSecondNs) == doctest::Approx(420).epsilon(0.1));
  CHECK(never.estimate_us(kHbm, kHbm, size(false), kSecondNs) == never.estimate_us(kHbm, kHbm, size(true), kSecondNs));
}

TEST_CASE("a write of many short pieces that are calls goes to the route whose calls cost least") {
  constexpr WriteSize kApart{8000, 8000 * 128, false};
  constexpr WriteSize kTogether{8000, 8000 * 128, true};
  // As they were measured once: a list of cma's costs a little more than a frame's.
  RouteCost cma(kCmaPrior, kCmaCallUs);
  RouteCost sock(kSockPrior, kSockCallUs);
  cma.set_prior(Medium::kHbm, Medium::kHbm, {1.5, 0.35, 1 / 7e3});
  sock.set_prior(Medium::kHbm, Medium::kHbm, {15, 0.1, 1 / 3e3});
  const auto us = [](const RouteCost& cost, const WriteSize& size) {
    return cost.estimate_us(kHbm, kHbm, size, kSecondNs);
  };
  CHECK(us(sock, kTogether) < us(cma, kTogether));
  CHECK(us(cma, kApart) < us(sock, kApart));
}

TEST_CASE("while a prior is set, an estimate uses the old or the new one") {
  RouteCost cost({1000, 0, 1});  // of 1000 bytes: 2000
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!over) {
        const double us = cost.estimate_us(kHbm, kHbm, {1, 1000}, kSecondNs);
        if (us != 2000 && us != 30 && us != 700) std::abort();
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    cost.set_prior(Medium::kHbm, Medium::kHbm, {10, 0, 0.02});
    cost.set_prior(Medium::kHbm, Medium::kHbm, {100, 100, 0.5});
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(cost.estimate_us(kHbm, kHbm, {1, 1000}, kSecondNs) == 700);
}

}  // namespace
}  // namespace kvpool
