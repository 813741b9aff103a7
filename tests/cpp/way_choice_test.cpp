// Which way attention takes to blocks at peers, from the times that earlier calls took.
#include "kvpool/distributed/way_choice.h"

#include <doctest/doctest.h>

#include <vector>

#include "kvpool/base/pace.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kNow = 5'000'000'000;
constexpr std::uint64_t kMiB = 1 << 20;

// Takes `fixed_ns`, and `ns_per_byte` for each byte.
void record(Pace& pace, double fixed_ns, double ns_per_byte) {
  for (const std::uint64_t mib : {1, 4, 16, 2, 8}) {
    const auto bytes = static_cast<double>(mib * kMiB);
    pace.record(bytes, static_cast<std::int64_t>(fixed_ns + ns_per_byte * bytes), kNow);
  }
}

TEST_CASE("a pace is fitted to a fixed time and a time for each unit") {
  Pace pace;
  CHECK_FALSE(pace.estimate_ns(1).has_value());
  CHECK(pace.last_ns() == 0);
  pace.record(100, 1000, 1);
  CHECK(*pace.estimate_ns(200) == doctest::Approx(2000));  // of one size alone: in proportion
  Pace fitted;
  record(fitted, 50'000, 0.1);
  CHECK(*fitted.estimate_ns(0) == doctest::Approx(50'000).epsilon(0.01));
  CHECK(*fitted.estimate_ns(32 * kMiB) == doctest::Approx(50'000 + 0.1 * 32 * kMiB).epsilon(0.01));
  CHECK(fitted.last_ns() == kNow);
  for (int i = 0; i < 200; ++i) record(fitted, 10'000, 0.3);  // it has changed
  CHECK(*fitted.estimate_ns(32 * kMiB) == doctest::Approx(10'000 + 0.3 * 32 * kMiB).epsilon(0.01));
  Pace downhill;
  downhill.record(1, 100, 1);
  downhill.record(2, 50, 1);
  CHECK(*downhill.estimate_ns(1000) >= 0);
}

TEST_CASE("what is quicker to read from here than to ask for comes here, and no more") {
  Pace here;
  record(here, 5'000, 0.1);
  Pace quick;
  record(quick, 20'000, 0.1);
  Pace slow;
  record(slow, 3'000'000, 0.1);
  // A little, which would wait for the way there and back.
  CHECK(read_from_here(0, here, {{&quick, kMiB / 64, true}}, kNow) == std::vector{true});
  // As much as here: two compute beside each other.
  CHECK(read_from_here(16 * kMiB, here, {{&quick, 16 * kMiB, true}}, kNow) == std::vector{false});
  CHECK(read_from_here(16 * kMiB, here, {{&slow, kMiB, true}}, kNow) == std::vector{true});
  CHECK(read_from_here(16 * kMiB, here, {{&slow, kMiB, false}}, kNow) == std::vector{false});
  CHECK(read_from_here(4 * kMiB, here, {{&quick, 4 * kMiB, true}, {&slow, 4 * kMiB, true}}, kNow) ==
        std::vector{false, true});
  CHECK(read_from_here(4 * kMiB, here, {}, kNow).empty());
}

TEST_CASE("a way that was not taken for a while is tried again") {
  Pace here;
  record(here, 5'000, 0.1);
  Pace slow;
  CHECK(read_from_here(0, here, {{&slow, kMiB, true}}, kNow) == std::vector{false});  // never tried
  record(slow, 3'000'000, 0.1);
  CHECK(read_from_here(0, here, {{&slow, kMiB, true}}, kNow) == std::vector{true});
  CHECK(read_from_here(0, here, {{&slow, kMiB, true}}, kNow + 2'000'000'000) == std::vector{false});
}

}  // namespace
}  // namespace kvpool::testing
