#include "kvpool/pool/disk_admission.h"

#include <doctest/doctest.h>

using namespace kvpool;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::int64_t kSecond = ByteBudget::kSecondNs;
constexpr std::int64_t kStart = 1000 * kSecond;

}  // namespace

TEST_CASE("a page is admitted when it was stored and then matched, or always") {
  CHECK_FALSE(admits(DiskAdmission::kOnSecondUse, 0));
  CHECK(admits(DiskAdmission::kOnSecondUse, 1));
  CHECK(admits(DiskAdmission::kAlways, 0));
}

TEST_CASE("a budget without limits never waits") {
  ByteBudget budget(0, 0);
  budget.charge(1ULL << 50, kStart);
  CHECK(budget.wait_ns(kStart) == 0);
}

TEST_CASE("what is written beyond a second's bytes is owed, and paid by time") {
  ByteBudget budget(100, 0);
  CHECK(budget.wait_ns(kStart) == 0);
  budget.charge(100, kStart);
  CHECK(budget.wait_ns(kStart) == 0);
  budget.charge(50, kStart);
  CHECK(budget.wait_ns(kStart) >= kSecond / 2);
  CHECK(budget.wait_ns(kStart) <= kSecond / 2 + 1000);
  CHECK(budget.wait_ns(kStart + kSecond) == 0);
  budget.charge(50, kStart + kSecond);
  CHECK(budget.wait_ns(kStart + kSecond) == 0);
  // Time alone saves no more than one second's bytes.
  CHECK(budget.wait_ns(kStart + 100 * kSecond) == 0);
  budget.charge(101, kStart + 100 * kSecond);
  CHECK(budget.wait_ns(kStart + 100 * kSecond) > 0);
}

TEST_CASE("a day's bytes are for a day") {
  ByteBudget budget(0, 100);
  CHECK(budget.wait_ns(kStart) == 0);
  budget.charge(60, kStart);
  CHECK(budget.wait_ns(kStart) == 0);
  budget.charge(60, kStart + kSecond);
  CHECK(budget.today() == 120);
  CHECK(budget.wait_ns(kStart + 2 * kSecond) == ByteBudget::kDayNs - 2 * kSecond);
  CHECK(budget.wait_ns(kStart + ByteBudget::kDayNs) == 0);
  CHECK(budget.today() == 0);
}
