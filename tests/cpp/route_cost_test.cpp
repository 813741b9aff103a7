#include "kvpool/transport/route_cost.h"

#include <doctest/doctest.h>

#include <thread>
#include <vector>

namespace kvpool {
namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;
constexpr RoutePrior kPrior{10, 1, 0.001};

TEST_CASE("a cost is its prior until something was measured") {
  const RouteCost cost(kPrior);
  CHECK(cost.estimate_us(1, 1000, 0) == doctest::Approx(12));
  CHECK(cost.estimate_us(100, 100'000, kSecondNs) == doctest::Approx(210));
}

TEST_CASE("a cost follows what writes of that size take") {
  RouteCost cost(kPrior);
  std::int64_t now = 100 * kSecondNs;
  for (int i = 0; i < 40; ++i) {
    now += 1'000'000;
    cost.measured(64, 64 * 4096, 1000, now);
    cost.measured(1, 4096, 3, now);
  }
  CHECK(cost.estimate_us(64, 64 * 4096, now) == doctest::Approx(1000).epsilon(0.1));
  CHECK(cost.estimate_us(1, 4096, now) == doctest::Approx(3).epsilon(0.1));
}

TEST_CASE("sizes that were not seen take the correction of those that were") {
  RouteCost cost(kPrior);
  const std::int64_t now = kSecondNs;
  for (int i = 0; i < 40; ++i) cost.measured(1, 1 << 20, 4 * (11 + 0.001 * (1 << 20)), now);
  CHECK(cost.estimate_us(1000, 1000, now) == doctest::Approx(4 * 1011).epsilon(0.1));
}

TEST_CASE("one outlier does not decide, and what it did fades") {
  RouteCost cost(kPrior);
  std::int64_t now = kSecondNs;
  for (int i = 0; i < 40; ++i) cost.measured(1, 1000, 12, now);
  cost.measured(1, 1000, 1e9, now);
  CHECK(cost.estimate_us(1, 1000, now) < 2 * 12);
  for (int i = 0; i < 40; ++i) cost.measured(1, 1000, 100 * 12, now);
  CHECK(cost.estimate_us(1, 1000, now) > 50 * 12);
  now += 60 * kSecondNs;
  CHECK(cost.estimate_us(1, 1000, now) == doctest::Approx(12).epsilon(0.01));
}

TEST_CASE("numbers that make no sense change nothing") {
  RouteCost cost(kPrior);
  cost.measured(1, 1000, 0, kSecondNs);
  cost.measured(1, 1000, -5, kSecondNs);
  RouteCost free(RoutePrior{0, 0, 0});
  free.measured(1, 1, 100, kSecondNs);
  CHECK(cost.estimate_us(1, 1000, kSecondNs) == doctest::Approx(12));
  CHECK(free.estimate_us(1, 1, kSecondNs) == 0);
  CHECK(cost.estimate_us(0, 0, kSecondNs) == doctest::Approx(10));
  CHECK(cost.estimate_us(UINT64_MAX, UINT64_MAX, kSecondNs) > 0);
}

TEST_CASE("threads may measure and estimate at once") {
  RouteCost cost(kPrior);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&cost] {
      for (int i = 1; i < 2000; ++i) {
        cost.measured(4, 4096, 30, i * 1'000'000LL);
        const double us = cost.estimate_us(4, 4096, i * 1'000'000LL);
        if (!(us > 0 && us < 1000)) std::abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(cost.estimate_us(4, 4096, 2 * kSecondNs) == doctest::Approx(30).epsilon(0.1));
}

}  // namespace
}  // namespace kvpool
