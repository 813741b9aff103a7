// Swaps of a pool: what moves, what stays readable at its old address, and what is taken back.
#include <doctest/doctest.h>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "pool_counts.h"
#include "pool_fixture.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

TEST_CASE("a swap out of more than DRAM can hold moves what fits, and leaves the rest in place") {
  const auto pool = audited_pool(8, 3);
  insert(pool, prompt(1, 2), alloc(*pool, 2));
  REQUIRE(pool->swap_out(2).size() == 2);  // in the way
  insert(pool, prompt(2, 8), alloc(*pool, 8));
  CHECK(pool->swap_out(8).size() == 3);
  const Found found = match(pool, prompt(2, 8));
  REQUIRE(found.hit.pages == 8);
  for (std::size_t i = 0; i < 8; ++i) CHECK(medium_of(found.addresses[i]) == (i < 5 ? Medium::kHbm : Medium::kDram));
}

TEST_CASE("long swaps and evictions go in batches and lose nothing") {
  PoolOptions options = small_options(20000, 20000);
  options.layout.piece_bytes = {8};
  const auto pool = std::make_shared<Pool>(options);
  for (Token id = 1; id <= 10; ++id) {
    const Addresses blocks = alloc(*pool, 1500);
    for (std::size_t i = 0; i < blocks.size(); ++i) stamp(*pool, blocks[i], static_cast<std::uint64_t>(id) * 10000 + i);
    insert(pool, prompt(id, 1500), blocks);
  }
  CHECK(pool->swap_out(14000).size() == 14000);
  for (Token id = 1; id <= 10; ++id) {
    const Found found = match(pool, prompt(id, 1500));
    REQUIRE(found.hit.pages == 1500);
    for (std::size_t i = 0; i < 1500; ++i) {
      REQUIRE(has_stamp(*pool, found.addresses[i], static_cast<std::uint64_t>(id) * 10000 + i));
    }
  }
  CHECK(pool->evict(14500, kMixed) == 14500);
  CHECK(count_in(hbm_counts(pool->audit()), BlockState::kHistorical) == 500);
}

TEST_CASE("a swapped-in block can be read at its old address until the pins of that time are released") {
  const auto pool = audited_pool(4, 4);
  const Addresses blocks = alloc(*pool, 2);
  for (std::size_t i = 0; i < 2; ++i) stamp(*pool, blocks[i], 70 + i);
  insert(pool, prompt(1, 2), blocks);
  REQUIRE(pool->swap_out(2).size() == 2);

  Found before = match(pool, prompt(1, 2));
  Addresses hot(2);
  Pins pins(pool, pool->swap_in(before.addresses, {}, hot.data()));
  Found after = match(pool, prompt(1, 2));
  CHECK(after.addresses == hot);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(has_stamp(*pool, before.addresses[i], 70 + i));
    CHECK(has_stamp(*pool, hot[i], 70 + i));
  }
  CHECK(count_in(dram_counts(pool->stats()), BlockState::kHistorical) == 2);
  Addresses again(2);
  {
    Pins more(pool, pool->swap_in(before.addresses, {}, again.data()));
  }  // by the addresses of the open match
  CHECK(again == hot);
  const Addresses both = {before.addresses[0], hot[0]};
  CHECK(code_of([&] { Pins none(pool, pool->swap_in(both, {}, again.data())); }) == ErrorCode::kArgument);
  CHECK(insert(pool, prompt(1, 2), before.addresses).canonical == hot);  // the caller's prefix, by its old address
  after.pins.release();
  CHECK(count_in(dram_counts(pool->stats()), BlockState::kHistorical) == 2);
  before.pins.release();
  CHECK(count_in(dram_counts(pool->audit()), BlockState::kFree) == 4);
}

TEST_CASE("a prompt that was cut while its blocks were in limbo still releases them") {
  const auto pool = audited_pool(8, 8);
  insert(pool, prompt(1, 4), alloc(*pool, 4));
  REQUIRE(pool->swap_out(4).size() == 4);
  Found before = match(pool, prompt(1, 4));
  Addresses hot(4);
  Pins pins(pool, pool->swap_in(before.addresses, {}, hot.data()));
  Tokens branch = prompt(1, 2);
  const Tokens tail = prompt(9, 2);
  branch.insert(branch.end(), tail.begin(), tail.end());
  Addresses whole = {hot[0], hot[1]};
  const Addresses fresh = alloc(*pool, 2);
  whole.insert(whole.end(), fresh.begin(), fresh.end());
  insert(pool, branch, whole);
  before.pins.release();
  CHECK(count_in(dram_counts(pool->audit()), BlockState::kFree) == 8);
}

TEST_CASE("swap_in makes room by moving others down, and fails as a whole when it cannot") {
  const auto pool = audited_pool(4, 8);
  insert(pool, prompt(1, 4), alloc(*pool, 4));
  insert(pool, prompt(2, 4), alloc(*pool, 4));  // pushes the first down
  Found cold = match(pool, prompt(1, 4));
  REQUIRE(medium_of(cold.addresses[0]) == Medium::kDram);
  Addresses hot(4);
  {
    const Found hog = match(pool, prompt(2, 4));
    CHECK(code_of([&] { Pins none(pool, pool->swap_in(cold.addresses, {}, hot.data())); }) == ErrorCode::kOutOfBlocks);
    CHECK(match(pool, prompt(1, 4)).addresses == cold.addresses);
  }
  Pins pins(pool, pool->swap_in(cold.addresses, {}, hot.data()));
  CHECK(medium_of(match(pool, prompt(2, 4)).addresses[0]) == Medium::kDram);
}

}  // namespace
}  // namespace kvpool::testing
