#include "kvpool/routes/cost_fit.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "fuzz_seeds.h"

namespace kvpool::testing {
namespace {

// The times of probes: few bytes and many, of one block and of several, three times each.
std::vector<CostSample> samples_of(const RoutePrior& prior) {
  std::vector<CostSample> samples;
  for (int i = 0; i < 3; ++i) {
    for (const auto& [pieces, bytes] : {std::pair(1, 512), std::pair(32, 16'384), std::pair(64, 1 << 20)}) {
      const auto n = static_cast<std::uint64_t>(pieces);
      const auto length = static_cast<std::uint64_t>(bytes);
      samples.push_back({n, length, prior.us({n, length})});
      samples.push_back({4 * n, 4 * length, prior.us({4 * n, 4 * length})});
    }
  }
  return samples;
}

void check_is(const std::optional<RoutePrior>& found, const RoutePrior& prior) {
  REQUIRE(found);
  CHECK(found->latency_us == doctest::Approx(prior.latency_us).epsilon(0.001));
  CHECK(found->us_per_piece == doctest::Approx(prior.us_per_piece).epsilon(0.001));
  CHECK(found->us_per_byte / prior.us_per_byte == doctest::Approx(1).epsilon(0.001));
}

constexpr RoutePrior kSome[] = {{15, 0.3, 1 / 3e3}, {2, 0.02, 1 / 40e3}, {400, 0, 1 / 1e2}, {0, 5, 1 / 10e3}};

TEST_CASE("the cost of a write is fitted to the times of earlier writes") {
  for (const RoutePrior& prior : kSome) check_is(fit_cost(samples_of(prior)), prior);
}

TEST_CASE("one outlier of each size does not change the fit") {
  for (const RoutePrior& prior : kSome) {
    for (const double factor : {0.01, 100.0}) {
      std::vector<CostSample> samples = samples_of(prior);
      for (std::size_t i = 0; i < samples.size() / 3; ++i) samples[i].us *= factor;
      check_is(fit_cost(samples), prior);
    }
  }
}

TEST_CASE("no coefficient of a fit is negative, so larger writes never cost less") {
  // Of one that takes less for more.
  const auto falling = fit_cost(std::vector<CostSample>{{1, 1000, 50}, {10, 10'000, 20}, {100, 100'000, 5}});
  REQUIRE(falling);
  CHECK(falling->us({1, 1000}) <= falling->us({100, 100'000}));
  Dice dice(3);
  for (int round = 0; round < 500; ++round) {
    std::vector<CostSample> samples;
    for (std::size_t i = 2 + dice.below(10); i > 0; --i) {
      samples.push_back({dice.below(64), dice.below(1 << 20), static_cast<double>(dice.below(100'000)) / 100});
    }
    const auto found = fit_cost(samples);
    if (!found) continue;
    CHECK(found->latency_us >= 0);
    CHECK(found->us_per_piece >= 0);
    CHECK(found->us_per_byte > 0);
    CHECK(std::isfinite(found->us({1000, 1 << 30})));
  }
}

TEST_CASE("blocks too small to tell pieces from bytes still get a cost") {
  const auto found = fit_cost(std::vector<CostSample>{{1, 128, 10.128}, {32, 4096, 14.096}});
  check_is(found, {10, 0, 0.001});
}

TEST_CASE("one length, no samples, or samples that took no time give no cost") {
  CHECK_FALSE(fit_cost({}));
  CHECK_FALSE(fit_cost(std::vector<CostSample>{{1, 512, 10}, {1, 512, 12}}));
  CHECK_FALSE(fit_cost(std::vector<CostSample>{{1, 512, 10}, {4, 512, 12}}));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  CHECK_FALSE(fit_cost(std::vector<CostSample>{{1, 512, 10}, {1, 1024, 0}, {1, 2048, -3}, {1, 9, nan}, {1, 8, inf}}));
}

}  // namespace
}  // namespace kvpool::testing
