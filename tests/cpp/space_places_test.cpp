// Places: where a block of one model finds room among those of others, when enough units are free or can be evicted.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "quota_space_kit.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

constexpr QuotaRule kNoRule{0, UINT32_MAX, 0};

// A model whose blocks are units, and has them all: a test says which become free, or cached.
struct Filled {
  explicit Filled(std::uint32_t units) : models(units, 0), small(models.load(1, kNoRule, kNoRule, /*audit=*/false)) {
    for (const Address address : alloc(*small, units)) at[block_of(address)] = address;
  }
  ~Filled() { models.audit(); }
  Filled(const Filled&) = delete;
  Filled& operator=(const Filled&) = delete;

  void free(std::uint32_t unit) { small->free(&at.at(unit), 1); }
  // As the prompt with this unit as its id, and with what continues it in other units.
  void cache(std::uint32_t unit, const std::vector<std::uint32_t>& continued = {}) {
    Addresses blocks{at.at(unit)};
    for (const std::uint32_t other : continued) blocks.push_back(at.at(other));
    insert(small, prompt(static_cast<Token>(unit), blocks.size()), blocks);
  }
  bool cached(std::uint32_t unit) { return match(small, prompt(static_cast<Token>(unit), 1)).hit.pages == 1; }
  std::uint32_t historical() { return models.of(*small).historical; }

  Models models;
  std::shared_ptr<Pool> small;
  std::map<std::uint32_t, Address> at;  // by unit
};

}  // namespace

TEST_CASE("a place is found although others get the lock while the units before it are looked at") {
  Filled filled(5000);
  // The first hold ends within it.
  for (std::uint32_t unit = 4092; unit < 4100; ++unit) filled.cache(unit);
  for (std::uint32_t unit = 0; unit < 16; unit += 2) filled.free(unit);  // so that nothing is evicted before
  const auto large = filled.models.load(8, kNoRule, kNoRule, /*audit=*/false);
  CHECK(block_of(alloc(*large, 1)[0]) == 4092);
}

TEST_CASE("a block finds a place that has more extents than are looked at under one hold of the lock") {
  Filled filled(9001);
  // Half of it goes first, by age: every other unit, so that 4,500 units next to each other are as many extents.
  for (const std::uint32_t half : {0U, 1U}) {
    for (std::uint32_t unit = half; unit < 9001; unit += 2) {
      if (unit != 4500) filled.cache(unit);
    }
  }
  const auto large = filled.models.load(4500, kNoRule, kNoRule, /*audit=*/false);
  CHECK(alloc(*large, 1).size() == 1);
}

TEST_CASE("what is left of one place is part of the next, once, also when others get the lock between them") {
  constexpr std::uint32_t kMiddle = 5003;  // blocks of three units, behind three of one unit
  for (const std::uint32_t more : {0U, 3U}) {
    CAPTURE(more);
    const std::uint32_t evictable = 3 + 3 * kMiddle + more;
    Filled filled(evictable + 8);
    for (std::uint32_t unit = evictable + 1; unit < evictable + 8; unit += 2)
      filled.free(unit);  // the room for one more
    for (std::uint32_t unit = 3; unit < evictable - more; ++unit) filled.free(unit);
    const auto middle = filled.models.load(3, kNoRule, kNoRule, /*audit=*/false);
    cache(middle, 0, kMiddle);
    for (const std::uint32_t unit : {0U, 1U, 2U}) filled.cache(unit);
    for (std::uint32_t unit = evictable - more; unit < evictable; ++unit) filled.cache(unit);

    const auto large = filled.models.load(4, kNoRule, kNoRule, /*audit=*/false);
    const auto refused = refusal(*large, evictable / 4 + 1);
    REQUIRE(refused);
    CHECK(field(*refused, "fragmented") == 1);
    CHECK(filled.historical() + filled.models.of(*middle).historical == evictable);
    CHECK(alloc(*large, evictable / 4).size() == evictable / 4);
  }
}

TEST_CASE("places are found behind those that were cleared, which are one free run with what lies before them") {
  constexpr std::uint32_t kPairs = 1000;  // of a free place and a cached one, behind each a unit in use
  Filled filled(17 * kPairs);
  for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
    for (std::uint32_t unit = 9 * pair; unit < 9 * pair + 4; ++unit) filled.free(unit);
    for (std::uint32_t unit = 9 * pair + 4; unit < 9 * pair + 8; ++unit) filled.cache(unit);
  }
  for (std::uint32_t unit = 9 * kPairs; unit < 17 * kPairs; unit += 2)
    filled.free(unit);  // so nothing is evicted before
  const auto large = filled.models.load(4, kNoRule, kNoRule, /*audit=*/false);
  CHECK(alloc(*large, 2 * kPairs).size() == 2 * kPairs);
  CHECK(filled.historical() == 0);
}

TEST_CASE("a block in pieces is lost once, however many of them lie in a place") {
  constexpr std::uint32_t kPieces = 32;
  Filled filled(5 * kPieces);
  const auto scattered = filled.models.load(kPieces, kNoRule, kNoRule, true, kPieces);
  const auto scatter = [&](Token id, std::uint32_t from, std::uint32_t step) {
    for (std::uint32_t i = 0; i < kPieces; ++i) filled.free(from + i * step);
    insert(scattered, prompt(id, 1), alloc(*scattered, 1));
  };
  // Three share units 0 to 95, and one lies between units that are in use. A reserve is left to one of them.
  for (std::uint32_t i = 0; i < 3; ++i) scatter(static_cast<Token>(i), i, 3);
  scatter(3, 3 * kPieces, 2);
  filled.models.set(*scattered, {kPieces, UINT32_MAX, 0});
  REQUIRE(filled.models.of(*scattered).historical == 4 * kPieces);

  const auto whole = filled.models.load(kPieces, kNoRule);
  CHECK(alloc(*whole, 1).size() == 1);
  CHECK(filled.models.of(*scattered).historical == kPieces);
  CHECK(match(scattered, prompt(3, 1)).hit.pages == 1);
  scattered->audit();
}

TEST_CASE("blocks of other sizes that have gone leave gaps, and no cache is dropped when they make too few places") {
  Models models(16, 0);
  auto gone = models.load(3, kNoRule);
  const auto model = models.load(4, kNoRule);
  const Addresses first = alloc(*gone, 1);
  const Addresses busy = alloc(*model, 2);
  cache(model, 0, 1);
  gone->free(first.data(), first.size());
  gone.reset();
  const auto refused = refusal(*model, 2);
  REQUIRE(refused);
  CHECK(field(*refused, "fragmented") == 1);
  CHECK(models.of(*model).historical == 4);
  CHECK(alloc(*model, 1).size() == 1);
  models.audit();
}

TEST_CASE("nothing is dropped in a place that has one with what was cleared before it") {
  Filled filled(32);
  for (std::uint32_t unit = 0; unit < 16; unit += 2) filled.free(unit);  // so that nothing is evicted before
  // Five units with two places, of which the first costs more; further on one that costs still more.
  filled.cache(17, {30});
  for (const std::uint32_t unit : {18U, 19U, 20U, 21U}) filled.cache(unit);
  filled.cache(23, {29, 31});
  for (const std::uint32_t unit : {24U, 25U, 26U}) filled.cache(unit);
  const auto large = filled.models.load(4, kNoRule);
  CHECK(alloc(*large, 2).size() == 2);
  CHECK(filled.cached(17));
  CHECK(filled.historical() == 2);
}

TEST_CASE("what a free run leaves of its last block counts, with what can be evicted beside it") {
  for (const bool before : {true, false}) {
    CAPTURE(before);
    Filled filled(11);
    // Seven free units hold one block, and with one more unit two.
    const std::uint32_t cached = before ? 2 : 9;
    for (std::uint32_t unit = before ? 3 : 2; unit < (before ? 10U : 9U); ++unit) filled.free(unit);
    filled.cache(cached);
    filled.free(0);
    const auto large = filled.models.load(4, kNoRule);
    CHECK(alloc(*large, 2).size() == 2);
    CHECK(filled.historical() == 0);
  }
}

TEST_CASE("no more places are cleared than there are blocks to allocate") {
  Filled filled(64);
  for (std::uint32_t unit = 0; unit < 32; unit += 2) filled.free(unit);  // so that nothing is evicted before
  for (std::uint32_t unit = 33; unit < 57; ++unit) filled.cache(unit);
  const auto large = filled.models.load(4, kNoRule);
  CHECK(alloc(*large, 3).size() == 3);
  CHECK(filled.historical() == 12);
}
