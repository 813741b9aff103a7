// The blocks in which content is being placed.
#include "kvpool/transfer/placements.h"

#include <doctest/doctest.h>

#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "failing_alloc.h"
#include "fuzz_seeds.h"

namespace kvpool::testing {
namespace {

std::vector<Address> blocks_from(Address first, std::size_t n) {
  std::vector<Address> blocks;
  for (std::size_t i = 0; i < n; ++i) blocks.push_back(first + i);
  return blocks;
}

TEST_CASE("a placement is ended by its number, once, whatever the id of its transfer") {
  Placements placements;
  const std::uint64_t first = placements.begin(7, 1, {100, 101});
  const std::uint64_t second = placements.begin(7, 2, {});
  CHECK(first != second);
  CHECK(placements.is_placed_now(std::vector<Address>{99, 101}));
  CHECK_FALSE(placements.is_placed_now(std::vector<Address>{99, 102}));
  const auto ended = placements.end(second);
  REQUIRE(ended.has_value());
  CHECK(ended->transfer == 7);
  CHECK(ended->content == 2);
  CHECK_FALSE(ended->in_blocks);
  CHECK_FALSE(placements.end(second).has_value());
  CHECK(placements.is_placed_now(std::vector<Address>{100}));
  CHECK(placements.end(first)->in_blocks);
  CHECK_FALSE(placements.is_placed_now(std::vector<Address>{100, 101}));
}

TEST_CASE("placements agree with a naive model after every event") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    CAPTURE(seed);
    std::mt19937_64 dice(seed);
    Placements placements;
    std::map<std::uint64_t, std::vector<Address>> model;
    for (int i = 0; i < fuzz_length(500); ++i) {
      if (model.empty() || dice() % 3 > 0) {
        std::vector<Address> blocks(dice() % 5);
        for (Address& block : blocks) block = dice() % 12;  // some stand twice
        const std::uint64_t number = placements.begin(dice() % 3, 1, blocks);
        REQUIRE(model.emplace(number, blocks).second);
      } else {
        const auto one = std::next(model.begin(), static_cast<std::ptrdiff_t>(dice() % model.size()));
        REQUIRE(placements.end(one->first)->in_blocks == !one->second.empty());
        model.erase(one);
      }
      std::set<Address> placed;
      for (const auto& [number, blocks] : model) placed.insert(blocks.begin(), blocks.end());
      for (Address block = 0; block < 12; ++block) {
        REQUIRE(placements.is_placed_now({&block, 1}) == placed.contains(block));
      }
    }
  }
}

TEST_CASE("running out of memory when a placement begins changes nothing") {
  const int threw = fail_each_allocation([](auto&& fail) {
    Placements placements;
    const std::uint64_t before = placements.begin(7, 1, {100});
    std::vector<Address> blocks = blocks_from(99, 20);
    const bool thrown = fail([&] { static_cast<void>(placements.begin(8, 1, std::move(blocks))); });
    CHECK(placements.is_placed_now(std::vector<Address>{100}));
    CHECK(placements.is_placed_now(std::vector<Address>{99, 101, 118}) == !thrown);
    CHECK(placements.end(before).has_value());
    CHECK(placements.is_placed_now(std::vector<Address>{100}) == !thrown);
  });
  CHECK(threw > 0);
}

TEST_CASE("a block is found by its addresses from before and after its pool got an instance id") {
  Placements placements;
  const Address before = make_address(0, Medium::kDram, 3, 17);
  const Address after = make_address(9, Medium::kDram, 3, 17);
  const std::uint64_t first = placements.begin(1, 1, {after});
  const std::uint64_t second = placements.begin(2, 1, {before});
  CHECK(placements.is_placed_now(std::vector{before}));
  CHECK(placements.is_placed_now(std::vector{after}));
  CHECK_FALSE(placements.is_placed_now(std::vector{make_address(9, Medium::kDram, 4, 17)}));
  CHECK(placements.end(first).has_value());
  CHECK(placements.is_placed_now(std::vector{after}));
  CHECK(placements.end(second).has_value());
  CHECK_FALSE(placements.is_placed_now(std::vector{before, after}));
}

}  // namespace
}  // namespace kvpool::testing
