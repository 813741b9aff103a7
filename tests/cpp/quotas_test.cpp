// Quotas: the plan by itself.
#include "kvpool/blocks/quotas.h"

#include <doctest/doctest.h>

using namespace kvpool;  // NOLINT(google-build-using-namespace)

TEST_CASE("a plan takes what is beyond quotas from the top, then the own cache, then what is beyond reserves") {
  QuotaTier tier;
  tier.capacity = 100;
  tier.models[0] = {{0, 100, 10}, 0, 40};   // 30 beyond
  tier.models[1] = {{0, 100, 10}, 0, 30};   // 20 beyond
  tier.models[2] = {{5, 100, 20}, 10, 10};  // within its quota
  REQUIRE(tier.admits(2, 75));
  CHECK(!tier.admits(2, 91));
  CHECK(tier.free() == 10);

  const QuotaRoom some = reclaim(tier, 2, 24, nullptr);
  CHECK(some.free == 10);
  REQUIRE(some.count == 2);
  CHECK(some.evictions[0].units == 12);  // to 18 beyond
  CHECK(some.evictions[1].units == 2);

  const QuotaRoom more = reclaim(tier, 2, 65, nullptr);
  REQUIRE(more.count == 3);
  CHECK(more.evictions[0].model == 2);  // its own comes first in the list
  CHECK(more.evictions[0].units == 5);
  CHECK(more.evictions[1].units == 30);
  CHECK(more.evictions[2].units == 20);
}

TEST_CASE("a plan takes nothing within a neighbour's reserve, however little the others have") {
  QuotaTier tier;
  tier.capacity = 10;
  tier.models[0] = {{5, 10, 5}, 0, 5};
  tier.models[2] = {{0, 10, 5}, 0, 5};
  tier.models[1].rule = {0, 10, 0};
  const QuotaRoom room = reclaim(tier, 1, 5, nullptr);
  REQUIRE(room.count == 1);
  CHECK(room.evictions[0].model == 2);
  CHECK(room.evictions[0].units == 5);
  CHECK(!tier.admits(1, 6));
}

TEST_CASE("what a plan evicts goes to DRAM as far as its owner's quota there and the room allow") {
  QuotaTier tier;
  tier.capacity = 20;
  tier.models[0] = {{0, 20, 0}, 0, 20};
  tier.models[1].rule = {0, 20, 20};
  QuotaTier dram;
  dram.capacity = 8;
  dram.models[0] = {{0, 8, 6}, 0, 1};
  const QuotaRoom room = reclaim(tier, 1, 10, &dram);
  REQUIRE(room.count == 1);
  CHECK(room.evictions[0].units == 10);
  CHECK(room.evictions[0].swapped == 5);
}

TEST_CASE("a plan names neighbours by number, whichever was asked first, and the first of them have the room in DRAM") {
  QuotaTier tier;
  tier.capacity = 10;
  tier.models[0].rule = {0, 10, 0};
  tier.models[1] = {{0, 10, 3}, 0, 3};  // within its quota: asked last
  tier.models[2] = {{0, 10, 0}, 0, 4};
  QuotaTier dram;
  dram.capacity = 4;
  dram.models[1].rule = {0, 4, 4};
  dram.models[2].rule = {0, 4, 4};
  const QuotaRoom room = reclaim(tier, 0, 9, &dram);
  REQUIRE(room.count == 2);
  CHECK(room.evictions[0].model == 1);
  CHECK(room.evictions[0].swapped == 2);
  CHECK(room.evictions[1].model == 2);
  CHECK(room.evictions[1].swapped == 2);
}
