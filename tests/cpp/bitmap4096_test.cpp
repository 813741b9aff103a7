// The bitmap of free runs' lengths beside a set.
#include "kvpool/blocks/bitmap4096.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <iterator>
#include <random>
#include <set>

namespace kvpool {
namespace {

TEST_CASE("a bitmap of 4096 finds the nearest member on either side") {
  Bitmap4096 bitmap;
  CHECK(bitmap.first_from(0) == Bitmap4096::kNone);
  CHECK(bitmap.last_below(4096) == Bitmap4096::kNone);
  std::set<std::uint32_t> model;
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    const std::uint32_t edges[] = {0, 1, 62, 63, 64, 65, 127, 128, 4031, 4032, 4094, 4095};
    const std::uint32_t i = random() % 2 == 0 ? edges[random() % 12] : random() % 4096;
    if (model.erase(i) != 0) {
      bitmap.clear(i);
    } else {
      bitmap.set(i);
      model.insert(i);
    }
    if (random() % 64 == 0) {
      for (const std::uint32_t member : model) bitmap.clear(member);
      model.clear();
    }
    const std::uint32_t at = random() % 2 == 0 ? edges[random() % 12] : random() % 4096;
    const auto above = model.lower_bound(at);
    REQUIRE(bitmap.first_from(at) == (above == model.end() ? Bitmap4096::kNone : *above));
    REQUIRE(bitmap.last_below(at) == (above == model.begin() ? Bitmap4096::kNone : *std::prev(above)));
    REQUIRE(bitmap.last_below(4096) == (model.empty() ? Bitmap4096::kNone : *model.rbegin()));
    REQUIRE(bitmap.test(at) == model.contains(at));
    REQUIRE(bitmap.consistent());
  }
}

}  // namespace
}  // namespace kvpool
