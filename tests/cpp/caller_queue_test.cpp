#include "kvpool/net/connect/caller_queue.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "fuzz_seeds.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST_CASE("a caller queue: the oldest of one source goes first") {
  CallerQueue queue(3);
  for (std::uint64_t id = 1; id <= 3; ++id) CHECK_FALSE(queue.enter(id, 7));
  CHECK(queue.enter(4, 7) == 1);
  CHECK(queue.enter(5, 7) == 2);
  queue.leave(3);
  CHECK_FALSE(queue.enter(6, 7));
  CHECK(queue.enter(7, 7) == 4);
  CHECK(queue.size() == 3);
}

TEST_CASE("a caller queue: a flooding source loses only its own callers") {
  CallerQueue queue(8);
  for (std::uint64_t id = 1; id <= 3; ++id) CHECK_FALSE(queue.enter(id, id));  // three sources with one caller each
  std::uint64_t oldest_of_flood = 100;
  for (std::uint64_t id = 100; id < 10'000; ++id) {
    const auto evicted = queue.enter(id, 99);
    if (id < 105) CHECK_FALSE(evicted);
    if (id >= 105) CHECK(evicted == oldest_of_flood++);
  }
  // Newcomers from elsewhere take places of the flood, until no source has more than another.
  for (std::uint64_t id = 10'000; id < 10'004; ++id) CHECK(queue.enter(id, id) == oldest_of_flood++);
  CHECK(queue.enter(20'000, 20'000) == 1);  // all have one: the oldest
}

TEST_CASE("a caller queue: an empty queue returns nobody, and a caller that left is not returned again") {
  CallerQueue queue(2);
  CHECK_FALSE(queue.first_to_go());
  queue.leave(5);
  queue.enter(5, 1);
  CHECK(queue.first_to_go() == 5);
  queue.leave(5);
  queue.leave(5);
  CHECK_FALSE(queue.first_to_go());
  CHECK(queue.size() == 0);
}

TEST_CASE("a caller queue: its invariants hold after any sequence of events") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("caller queue", seed);
    Dice dice(seed);
    const std::size_t limit = 1 + dice.below(12);
    CallerQueue queue(limit);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> model;  // id, source; the oldest first
    const auto of_source = [&](std::uint64_t source) {
      return std::ranges::count(model, source, &std::pair<std::uint64_t, std::uint64_t>::second);
    };
    for (std::uint64_t id = 1; id <= 3000; ++id) {
      if (!model.empty() && dice.one_in(4)) {
        const auto gone = model.begin() + static_cast<std::ptrdiff_t>(dice.below(model.size()));
        queue.leave(gone->first);
        model.erase(gone);
      }
      const std::uint64_t source = dice.below(4) * dice.below(4);
      const auto evicted = queue.enter(id, source);
      model.emplace_back(id, source);
      CHECK(evicted.has_value() == (model.size() > limit));
      if (evicted) {
        const auto gone = std::ranges::find(model, *evicted, &std::pair<std::uint64_t, std::uint64_t>::first);
        REQUIRE(gone != model.end());
        CHECK((*evicted != id || limit == 0));
        for (auto other = model.begin(); other != model.end(); ++other) {
          CHECK(of_source(gone->second) >= of_source(other->second));
          if (of_source(gone->second) == of_source(other->second)) CHECK(gone <= other);
        }
        model.erase(gone);
      }
      CHECK(queue.size() == model.size());
    }
  }
}
