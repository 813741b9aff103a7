// The units that caches share, beside a naive model: a vector of whose each unit is.
#include "kvpool/blocks/unit_set.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "thrown.h"

namespace kvpool {
namespace {

using testing::code_of;

struct Block {
  std::uint32_t first;
  std::uint32_t size;
  std::uint32_t owner;
};

std::vector<Block> take(UnitSet& units, std::uint32_t size, std::size_t n, std::uint32_t owner) {
  REQUIRE(units.fits(size, n) == n);
  std::vector<Block> taken;
  units.take(size, n, owner, [&](std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) taken.push_back({first + i * size, size, owner});
  });
  REQUIRE(taken.size() == n);
  return taken;
}

std::vector<Block> extents(const UnitSet& units) {
  std::vector<Block> found;
  for (std::uint32_t unit = 0; unit < units.size();) {
    const UnitExtent extent = units.at(unit);
    found.push_back({extent.first, extent.length, extent.owner});
    unit = extent.end();
  }
  return found;
}

// Whose each unit is.
class Model {
 public:
  explicit Model(std::uint32_t units) : owners_(units, UnitExtent::kFree) {}

  void take(const Block& block) {
    for (std::uint32_t unit = block.first; unit < block.first + block.size; ++unit) {
      REQUIRE(unit < owners_.size());
      REQUIRE(owners_[unit] == UnitExtent::kFree);
      owners_[unit] = block.owner;
    }
    blocks_.push_back(block);
  }
  void give_back(const Block& block) {
    for (std::uint32_t i = 0; i < block.size; ++i) owners_[block.first + i] = UnitExtent::kFree;
    std::erase_if(blocks_, [&](const Block& each) { return each.first == block.first; });
  }
  void abandon(std::uint32_t first) {
    for (Block& block : blocks_) {
      if (block.first == first) block.owner = UnitExtent::kNobody;
    }
  }

  std::vector<Block> free_runs() const {
    std::vector<Block> runs;
    for (std::uint32_t unit = 0; unit < owners_.size(); ++unit) {
      if (owners_[unit] != UnitExtent::kFree) continue;
      if (!runs.empty() && runs.back().first + runs.back().size == unit) {
        ++runs.back().size;
      } else {
        runs.push_back({unit, 1, UnitExtent::kFree});
      }
    }
    return runs;
  }
  std::size_t fits(std::uint32_t size) const {
    std::size_t found = 0;
    for (const Block& run : free_runs()) found += run.size / size;
    return found;
  }
  // The shortest free run that has room, or 0.
  std::uint32_t shortest_for(std::uint32_t size) const {
    std::uint32_t shortest = 0;
    for (const Block& run : free_runs()) {
      if (run.size >= size && (shortest == 0 || run.size < shortest)) shortest = run.size;
    }
    return shortest;
  }
  std::uint32_t run_at(std::uint32_t first) const {
    for (const Block& run : free_runs()) {
      if (run.first == first) return run.size;
    }
    return 0;
  }
  std::vector<Block> extents() const {
    std::vector<Block> all = free_runs();
    all.insert(all.end(), blocks_.begin(), blocks_.end());
    std::sort(all.begin(), all.end(), [](const Block& a, const Block& b) { return a.first < b.first; });
    return all;
  }
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  std::vector<std::uint32_t> owners_;
  std::vector<Block> blocks_;
};

bool same(const std::vector<Block>& a, const std::vector<Block>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Block& x, const Block& y) {
    return x.first == y.first && x.size == y.size && x.owner == y.owner;
  });
}

void fuzz(std::uint32_t size, const std::vector<std::uint32_t>& sizes, int events, std::uint64_t seed) {
  CAPTURE(seed);
  CAPTURE(size);
  std::mt19937_64 random(seed);
  const auto below = [&random](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
  UnitSet units(size);
  Model model(size);
  for (int event = 0; event < events; ++event) {
    CAPTURE(event);
    const std::uint32_t owner = below(sizes.size());
    const std::uint32_t length = sizes[owner];
    const std::size_t n = below(4);
    REQUIRE(units.fits(length, SIZE_MAX) == model.fits(length));
    REQUIRE(units.fits(length, n) == std::min(model.fits(length), n));
    if (below(5) == 0 && n > 0 && model.fits(length) >= n) {
      std::vector<std::uint32_t> firsts(n);
      units.take_pieces(length, firsts, owner);
      REQUIRE(std::ranges::is_sorted(firsts));
      for (const std::uint32_t first : firsts) {
        model.take({first, length, owner});
        REQUIRE(units.at(first).block == firsts[0]);
      }
      if (below(2) == 0) {
        units.give_back_pieces(length, firsts);
        for (const std::uint32_t first : firsts) model.give_back({first, length, owner});
      }
    } else if (below(5) < 3 && model.fits(length) >= n) {
      units.take(length, n, owner, [&](std::uint32_t first, std::uint32_t count) {
        REQUIRE(model.run_at(first) == model.shortest_for(length));
        for (std::uint32_t i = 0; i < count; ++i) {
          model.take({first + i * length, length, owner});
          REQUIRE(units.at(first + i * length).block == first + i * length);
        }
      });
    } else if (!model.blocks().empty()) {
      const Block block = model.blocks()[below(model.blocks().size())];
      if (block.owner != UnitExtent::kNobody && below(60) == 0) {
        units.abandon(block.first);
        model.abandon(block.first);
      } else {
        units.give_back(block.first, block.size, 1);
        model.give_back(block);
      }
    }
    REQUIRE_NOTHROW(units.audit("test"));
    REQUIRE(same(extents(units), model.extents()));
    std::uint32_t free = 0;
    std::uint32_t longest = 0;
    for (const Block& run : model.free_runs()) {
      free += run.size;
      longest = std::max(longest, run.size);
    }
    REQUIRE(units.free() == free);
    REQUIRE(units.free_runs() == model.free_runs().size());
    REQUIRE(units.longest_free() == longest);
    std::uint32_t head = 0;
    for (std::uint32_t unit = 0; unit < size; ++unit) {
      if (units.is_head(unit)) head = unit;
      REQUIRE(units.head_of(unit) == head);
    }
  }
}

}  // namespace

TEST_CASE("the units of several caches agree with a naive model after every event") {
  const int events = testing::model_length(1500);
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    fuzz(1, {1}, 20, seed);
    fuzz(60, {3, 4}, events, seed);
    fuzz(97, {1, 5, 17}, events, seed);
    fuzz(64, {2, 2, 8}, events / 2, seed);
    fuzz(20, {7, 30}, events / 4, seed);                // of which one never fits
    fuzz(30000, {900, 4100, 5000}, events / 50, seed);  // runs that are longer than those with bins
  }
}

TEST_CASE("long runs count by what fits into each, and no more than was asked for") {
  UnitSet units(3 * 9000 + 2);
  const std::vector<Block> thirds = take(units, 9000, 3, 0);
  CHECK(units.fits(3, 10) == 0);
  units.give_back(thirds[0].first, 9000, 1);
  units.give_back(thirds[2].first, 9000, 1);  // with the two units at the end
  CHECK(units.fits(4000, SIZE_MAX) == 4);
  CHECK(units.fits(4000, 3) == 3);
  CHECK(units.fits(4501, SIZE_MAX) == 3);
  CHECK(units.fits(4502, SIZE_MAX) == 2);
  CHECK(units.fits(9002, SIZE_MAX) == 1);
  CHECK(units.fits(9003, SIZE_MAX) == 0);
  CHECK(units.longest_free() == 9002);
  units.audit("test");
}

TEST_CASE("the smallest hole that a block fits into is filled first") {
  UnitSet units(40);
  const std::vector<Block> all = take(units, 4, 10, 0);
  units.give_back(all[1].first, 4, 1);
  units.give_back(all[4].first, 4, 2);  // two that lie one after another
  CHECK(units.longest_free() == 8);
  CHECK(take(units, 3, 1, 1)[0].first == all[1].first);
  CHECK(take(units, 3, 2, 1)[0].first == all[4].first);
  CHECK(units.free() == 3);
  CHECK(units.fits(3, 1) == 0);  // one here, two there
  units.audit("test");
}

TEST_CASE("what is given back is whole again: no unit is lost at its end") {
  UnitSet units(24);
  for (const std::uint32_t size : {1U, 2U, 5U, 7U, 24U}) {
    CAPTURE(size);
    const std::vector<Block> blocks = take(units, size, 24 / size, 3);
    for (const Block& block : blocks) units.give_back(block.first, size, 1);
    CHECK(units.free() == 24);
    CHECK(units.longest_free() == 24);
    units.audit("test");
  }
}

TEST_CASE("a unit set of no units fits nothing") {
  UnitSet none(0);
  CHECK(none.fits(1, SIZE_MAX) == 0);
  CHECK(none.longest_free() == 0);
  none.audit("test");
}

#ifndef KVPOOL_DEBUG  // which stops at the call
TEST_CASE("the audit of a unit set finds a block that was given back in part") {
  UnitSet units(30);
  const std::vector<Block> blocks = take(units, 5, 4, 1);
  units.audit("test");
  units.give_back(blocks[0].first, 4, 1);
  CHECK(code_of([&] { units.audit("test"); }) == ErrorCode::kAudit);
}
#endif

}  // namespace kvpool
