// Blocks in pieces: the table of where they lie, and caches that cut blocks which find no run.
#include "kvpool/blocks/block_pieces.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/blocks/block_copy.h"
#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/cache_blocks.h"
#include "lent_team.h"
#include "thrown.h"

namespace kvpool {
namespace {

using testing::code_of;
using Addresses = std::vector<Address>;
using Units = std::vector<std::uint32_t>;

// 24 units that a cache with 3 units a block has filled, beside one whose blocks of 6 units may be cut into 3 pieces.
struct Full {
  BlockSpace space{MediumMap<std::uint32_t>{24, 0, 0}, 2};
  CacheBlocks small{space, {.block_units = 3}};
  CacheBlocks large{space, {.block_units = 6, .pieces = 3}};
  Addresses threes = Addresses(8);

  Full() { REQUIRE(small.take(8, Medium::kHbm, BlockState::kActive, threes.data())); }

  void free(std::initializer_list<std::size_t> which) {
    for (const std::size_t i : which) small.release(&threes[i], 1);
  }
  std::uint32_t free_units() const {
    return space.counts(Medium::kHbm).by_state[static_cast<std::size_t>(BlockState::kFree)];
  }
  Units units_of(Address block) const {
    const BlockPieces& pieces = large.pieces(Medium::kHbm);
    Units units;
    for (std::uint32_t i = 0; i < 3; ++i) units.push_back(pieces.unit_of(block_of(block), i));
    return units;
  }
  void audit() const {
    small.audit();
    large.audit();
  }
};

bool take(CacheBlocks& blocks, Addresses& out) {
  return blocks.take(out.size(), Medium::kHbm, BlockState::kActive, out.data());
}

}  // namespace

TEST_CASE("the table of pieces agrees with a naive model, and uses the room of blocks that were freed again") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    CAPTURE(seed);
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    BlockPieces table(40, 5, 4, 2);
    std::map<std::uint32_t, Units> model;
    for (int event = 0; event < testing::model_length(2000); ++event) {
      const auto slot = static_cast<std::uint32_t>(random() % 20);  // in which no second block begins
      const auto there = model.lower_bound(2 * slot);
      const std::uint32_t block = 2 * slot + static_cast<std::uint32_t>(random() % 2);
      if (there != model.end() && there->first / 2 == slot) {
        if (random() % 2 == 0) {
          table.forget(there->first);
          model.erase(there);
        }
      } else if (model.size() < 5) {
        Units units{block};
        while (units.size() < 4) units.push_back(block + static_cast<std::uint32_t>(random() % 1000));
        table.scatter(block, units);
        model[block] = units;
      }
      REQUIRE(table.scattered() == model.size());
      table.audit("", [&](std::uint32_t each) { return model.contains(each); });
      for (std::uint32_t each = 0; each < 40; ++each) {
        const auto found = model.find(each);
        if (found == model.end() && model.contains(each ^ 1)) continue;  // its neighbour's slot
        REQUIRE(table.whole(each) == (found == model.end()));
        for (std::uint32_t i = 0; i < 4; ++i) {
          REQUIRE(table.unit_of(each, i) == (found == model.end() ? each + 2 * i : found->second[i]));
        }
      }
    }
    CHECK(table.metadata_bytes() <= (21 + 5 * 4) * 4);
  }
}

TEST_CASE("the audit of a table finds a list of a free block, and one whose block is not the least of its places") {
  const auto fault_of = [](const Units& units, bool has_units) {
    BlockPieces table(40, 5, 3, 2);
    table.scatter(7, units);
    return code_of([&] { table.audit("HBM", [&](std::uint32_t block) { return has_units && block == 7; }); });
  };
  CHECK(fault_of({7, 20, 30}, true) == std::nullopt);
  CHECK(fault_of({7, 20, 30}, false) == ErrorCode::kAudit);
  CHECK(fault_of({7, 4, 30}, true) == ErrorCode::kAudit);
}

TEST_CASE("a block that finds no run takes one for each piece, all or none, and its number is the first of them") {
  Full full;
  full.free({1, 3});  // units 3 to 5 and 9 to 11: a piece of two units in each
  Addresses one(1);
  CHECK(full.large.free_blocks(Medium::kHbm) == 0);
  CHECK_FALSE(take(full.large, one));
  CHECK(full.free_units() == 6);
  full.audit();

  full.free({6});  // 18 to 20
  CHECK(full.large.free_blocks(Medium::kHbm) == 1);
  REQUIRE(take(full.large, one));
  CHECK(block_of(one[0]) == 3);
  CHECK(full.units_of(one[0]) == Units{3, 9, 18});
  CHECK(full.free_units() == 3);
  full.audit();
  Addresses two(2);
  CHECK_FALSE(take(full.large, two));
  full.large.release(one.data(), 1);
  CHECK(full.free_units() == 9);
  CHECK(full.space.unit_set(Medium::kHbm).longest_free() == 3);
  CHECK(code_of([&] { full.large.check(one[0], 0, std::nullopt); }) == ErrorCode::kStaleAddress);
  full.audit();
}

TEST_CASE("of several blocks those that find a run are whole, and the others lie in what is left") {
  Full full;
  full.free({0, 1, 3, 5, 7});  // units 0 to 5, and three of three
  Addresses two(2);
  CHECK(full.large.free_blocks(Medium::kHbm) == 2);
  REQUIRE(take(full.large, two));
  CHECK(full.large.pieces(Medium::kHbm).whole(block_of(two[0])));
  CHECK(full.units_of(two[0]) == Units{0, 2, 4});
  CHECK(full.units_of(two[1]) == Units{9, 15, 21});
  CHECK(full.large.pieces(Medium::kHbm).scattered() == 1);
  full.audit();
  full.large.release(two.data(), 2);
  CHECK(full.free_units() == 15);
  CHECK(full.large.pieces(Medium::kHbm).scattered() == 0);
  full.audit();
}

TEST_CASE("a scattered block that is read keeps all of its pieces until the last reader releases it") {
  Full full;
  full.free({1, 3, 6});
  Addresses one(1);
  REQUIRE(take(full.large, one));
  full.large.hold_for_reading(one.data(), 1, 0);
  full.large.release(one.data(), 1);
  CHECK(full.free_units() == 3);
  full.audit();
  full.large.release_reading(one.data(), 1);
  CHECK(full.free_units() == 9);
  full.audit();
}

TEST_CASE("a cache that leaves gives back all pieces of a cached block, and loses those of a block in use") {
  for (const std::size_t cached : {0U, 1U}) {
    BlockSpace space(MediumMap<std::uint32_t>{24, 0, 0}, 2);
    CacheBlocks small(space, {.block_units = 3});
    Addresses threes(8);
    REQUIRE(take(small, threes));
    for (const std::size_t i : {0U, 1U, 3U, 5U, 7U}) small.release(&threes[i], 1);
    {
      CacheBlocks large(space, {.block_units = 6, .pieces = 3});
      Addresses both(2);
      REQUIRE(take(large, both));
      REQUIRE(large.pieces(Medium::kHbm).scattered() == 1);
      large.give({&both[cached], 1}, {BlockState::kHistorical, 0, 0});
    }
    small.audit();
    CHECK(space.counts(Medium::kHbm).by_state[static_cast<std::size_t>(BlockState::kRetired)] == 6);
    CHECK(space.counts(Medium::kHbm).by_state[static_cast<std::size_t>(BlockState::kFree)] == 9);
  }
}

TEST_CASE("the audit of a space finds pieces that are not where the table says") {
  // What is spoilt is never destroyed: caches that leave a space rely on it.
  static auto* const spoilt = new std::vector<std::unique_ptr<Full>>;
  const auto audit_of = [](auto&& spoil) {
    Full& full = *spoilt->emplace_back(std::make_unique<Full>());
    full.free({1, 3, 5, 7});
    Addresses one(1);
    REQUIRE(take(full.large, one));
    full.audit();
    auto& units = const_cast<UnitSet&>(full.space.unit_set(Medium::kHbm));
    auto& pieces = const_cast<BlockPieces&>(full.large.pieces(Medium::kHbm));
    spoil(full, units, pieces, one[0]);
    return code_of([&] { full.space.audit(); });
  };
  CHECK(audit_of([](auto&&...) {}) == std::nullopt);
  CHECK(audit_of([](Full& full, UnitSet& units, BlockPieces&, Address block) {
          units.give_back(full.units_of(block)[2], 2, 1);  // freed in part
        }) == ErrorCode::kAudit);
  CHECK(audit_of([](Full&, UnitSet& units, BlockPieces&, Address) {
          units.take(2, 1, 1, [](std::uint32_t, std::uint32_t) {});  // a piece too many
        }) == ErrorCode::kAudit);
  CHECK(audit_of([](Full&, UnitSet&, BlockPieces& pieces, Address block) { pieces.forget(block_of(block)); }) ==
        ErrorCode::kAudit);
  CHECK(audit_of([](Full&, UnitSet&, BlockPieces& pieces, Address) {
          pieces.scatter(16, Units{16, 18, 20});  // no block has this number
        }) == ErrorCode::kAudit);
}

TEST_CASE("blocks are cut only into whole units, and only where several caches share a space") {
  BlockSpace space(MediumMap<std::uint32_t>{24, 0, 0}, 2);
  CHECK(code_of([&] { CacheBlocks(space, {.block_units = 6, .pieces = 4}); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { CacheBlocks(space, {.block_units = 6, .pieces = 0}); }) == ErrorCode::kArgument);
  BlockSpace own(MediumMap<std::uint32_t>{24, 0, 0});
  CHECK(code_of([&] { CacheBlocks(own, {.block_units = 6, .pieces = 3}); }) == ErrorCode::kArgument);
  CacheBlocks fine(space, {.block_units = 6, .pieces = 3});
  CHECK(fine.number() == 0);
}

TEST_CASE("copies between tiers move every piece, wherever it lies on either side") {
  constexpr std::size_t kUnit = 16;
  constexpr std::uint32_t kUnits = 64;
  testing::LentTeam team(2);
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    CAPTURE(seed);
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    std::array<std::vector<std::byte>, 2> memory;
    std::array<std::shared_ptr<Arena>, 2> arenas;
    std::array<BlockPieces, 2> pieces{BlockPieces(kUnits, 8, 4, 2), BlockPieces(kUnits, 8, 4, 2)};
    std::array<Addresses, 2> blocks;
    for (std::size_t side = 0; side < 2; ++side) {
      memory[side].resize(kUnits * kUnit);
      for (std::byte& byte : memory[side]) byte = static_cast<std::byte>(random());
      const auto base =
          make_adopted_arena(Medium::kHbm, 1, {Segment{memory[side].data(), kUnits * kUnit, kUnits * kUnit}}, nullptr);
      arenas[side] = make_view_arena(base, kUnits - 8 + 1, 8 * kUnit, kUnit);
      Units places;  // of pieces of two units
      for (std::uint32_t unit = 0; unit < kUnits; unit += 2) places.push_back(unit);
      // Every other block is whole: in units 0 to 7, 16 to 23, ...; the others lie between them, in any order.
      std::erase_if(places, [](std::uint32_t unit) { return unit / 8 % 2 == 0; });
      std::shuffle(places.begin(), places.end(), random);
      for (std::uint32_t i = 0; i < 4; ++i) {
        blocks[side].push_back(make_address(0, Medium::kHbm, 1, 16 * i));
        Units its(places.begin() + 4 * i, places.begin() + 4 * i + 4);
        std::swap(its[0], *std::ranges::min_element(its));
        pieces[side].scatter(its[0], its);
        blocks[side].push_back(make_address(0, Medium::kHbm, 1, its[0]));
      }
      std::shuffle(blocks[side].begin(), blocks[side].end(), random);
    }
    std::vector<std::byte> expected = memory[1];
    for (std::size_t i = 0; i < 8; ++i) {
      for (std::uint32_t piece = 0; piece < 4; ++piece) {
        const std::size_t from = pieces[0].unit_of(block_of(blocks[0][i]), piece) * kUnit;
        const std::size_t to = pieces[1].unit_of(block_of(blocks[1][i]), piece) * kUnit;
        std::copy_n(memory[0].begin() + static_cast<std::ptrdiff_t>(from), 2 * kUnit,
                    expected.begin() + static_cast<std::ptrdiff_t>(to));
      }
    }
    PieceCopier(*arenas[0], pieces[0], *arenas[1], pieces[1]).run(team, blocks[0].data(), blocks[1].data(), 8);
    CHECK(memory[1] == expected);
  }
}

}  // namespace kvpool
