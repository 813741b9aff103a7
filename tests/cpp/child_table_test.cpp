// The table of all children, beside a plain list of its items.
#include "kvpool/index/child_table.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "failing_alloc.h"
#include "fuzz_seeds.h"

namespace {

using kvpool::ChildTable;
using kvpool::testing::announce_fuzz;
using kvpool::testing::Dice;
using kvpool::testing::fail_each_allocation;
using kvpool::testing::fuzz_length;
using kvpool::testing::fuzz_seeds;

struct Item {
  std::uint64_t key;
};
using Table = ChildTable<Item>;

constexpr std::size_t kSlotBytes = 16;

// Finds this very item, as a tree does by comparing tokens.
Item* find(const Table& table, const Item& item) {
  return table.find(item.key, [&](const Item* candidate) { return candidate == &item; });
}

void put(Table& table, Item& item) {
  table.reserve(1);
  table.insert(item.key, &item);
}

TEST_CASE("an empty table finds nothing and takes no memory") {
  const Table table;
  const Item stranger{7};
  CHECK(find(table, stranger) == nullptr);
  CHECK(table.size() == 0);
  CHECK(table.bytes() == 0);
}

TEST_CASE("items whose keys are equal are told apart by the predicate") {
  Table table;
  std::deque<Item> items(20, Item{42});
  for (Item& item : items) put(table, item);
  for (Item& item : items) CHECK(find(table, item) == &item);
  // Taking some out of the middle of the one long probe sequence does not hide those behind them.
  for (std::size_t i = 0; i < items.size(); i += 3) table.erase(42, &items[i]);
  for (std::size_t i = 0; i < items.size(); ++i) CHECK(find(table, items[i]) == (i % 3 == 0 ? nullptr : &items[i]));
}

TEST_CASE("a probe sequence that wraps around the end of the array stays whole") {
  Table table;
  std::deque<Item> items;
  for (std::uint64_t i = 0; i < 12; ++i) items.push_back({61 + 64 * i});  // 64 slots: home slot 61 for all
  for (Item& item : items) put(table, item);
  REQUIRE(table.bytes() == 64 * kSlotBytes);
  for (std::size_t gone = 0; gone < items.size(); ++gone) {
    table.erase(items[gone].key, &items[gone]);
    for (std::size_t i = 0; i < items.size(); ++i) CHECK(find(table, items[i]) == (i <= gone ? nullptr : &items[i]));
  }
  CHECK(table.size() == 0);
}

TEST_CASE("growth moves a few items at a time, and all can be found meanwhile") {
  Table table;
  std::deque<Item> items;
  bool was_between_two_arrays = false;
  for (std::uint64_t i = 0; i < 5000; ++i) {
    items.push_back({i * 0x9E3779B97F4A7C15ULL});
    const std::size_t before = table.bytes();
    put(table, items.back());
    // Two arrays at once: the older one is still being emptied.
    was_between_two_arrays = was_between_two_arrays || (table.bytes() & (table.bytes() - 1)) != 0;
    CHECK(table.bytes() <= std::max<std::size_t>(3 * before, 64 * kSlotBytes));
    if (i % 97 == 0 || before != table.bytes()) {
      for (Item& item : items) REQUIRE(find(table, item) == &item);
    }
  }
  CHECK(was_between_two_arrays);
  CHECK(table.size() == items.size());
  CHECK(table.size() * 8 <= table.bytes() / kSlotBytes * 5);
}

TEST_CASE("items can be taken out and replaced while the table grows") {
  Table table;
  std::deque<Item> items;
  for (std::uint64_t i = 0; i < 641; ++i) items.push_back({i});  // 1024 slots hold 640 items
  for (std::size_t i = 0; i < 640; ++i) put(table, items[i]);
  REQUIRE(table.bytes() == 1024 * kSlotBytes);
  put(table, items[640]);
  REQUIRE(table.bytes() == (1024 + 2048) * kSlotBytes);  // most items lie in the older array now

  std::deque<Item> substitutes;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i % 2 == 0) {
      table.erase(items[i].key, &items[i]);
    } else {
      table.replace(items[i].key, &items[i], &substitutes.emplace_back(items[i]));
    }
  }
  REQUIRE(table.bytes() == (1024 + 2048) * kSlotBytes);
  CHECK(table.size() == substitutes.size());
  for (Item& item : items) CHECK(find(table, item) == nullptr);
  for (Item& item : substitutes) CHECK(find(table, item) == &item);

  // Insertions finish the move.
  std::deque<Item> more;
  for (std::uint64_t i = 0; i < 64; ++i) put(table, more.emplace_back(Item{i}));
  CHECK(table.bytes() == 2048 * kSlotBytes);
  for (Item& item : substitutes) CHECK(find(table, item) == &item);
  for (Item& item : more) CHECK(find(table, item) == &item);
}

TEST_CASE("after room is reserved, that many insertions need no memory") {
  Table table;
  std::deque<Item> items(1000, Item{5});
  for (std::size_t i = 0; i < 39; ++i) put(table, items[i]);
  table.reserve(900);
  const kvpool::testing::FailNthAllocation failure(1);
  for (std::size_t i = 39; i < 939; ++i) table.insert(5, &items[i]);
  CHECK_FALSE(failure.failed_one());
  CHECK(table.size() == 939);
}

TEST_CASE("running out of memory while growing leaves the table unchanged") {
  const int threw = fail_each_allocation([](auto&& fail) {
    Table table;
    std::deque<Item> items;
    for (std::uint64_t i = 0; i < 40; ++i) put(table, items.emplace_back(Item{i}));
    const std::size_t bytes = table.bytes();
    if (fail([&] { table.reserve(1); })) {
      CHECK(table.bytes() == bytes);
    } else {
      CHECK(table.bytes() > bytes);
    }
    for (Item& item : items) CHECK(find(table, item) == &item);
  });
  CHECK(threw == 1);
}

void fuzz(std::uint64_t seed, std::uint64_t keys, int steps) {
  announce_fuzz("child table", seed);
  CAPTURE(seed);
  CAPTURE(keys);
  Dice dice(seed);
  Table table;
  std::deque<Item> storage;
  std::vector<Item*> present;
  std::vector<Item*> gone;
  std::uint32_t growth = 50;
  for (int step = 0; step < steps; ++step) {
    CAPTURE(step);
    if (step % 200 == 0) growth = 30 + dice.below(50);
    if (present.empty() || dice.below(100) < growth) {
      Item& item = storage.emplace_back(Item{dice.below(keys) * (dice.one_in(2) ? 64 : 1)});
      put(table, item);
      present.push_back(&item);
    } else {
      const std::size_t at = dice.below(present.size());
      if (dice.one_in(4)) {
        Item& substitute = storage.emplace_back(*present[at]);
        table.replace(present[at]->key, present[at], &substitute);
        gone.push_back(std::exchange(present[at], &substitute));
      } else {
        table.erase(present[at]->key, present[at]);
        gone.push_back(present[at]);
        present.erase(present.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    REQUIRE(table.size() == present.size());
    if (step % 16 != 0) continue;
    for (const Item* item : present) REQUIRE(find(table, *item) == item);
    for (const Item* item : gone) REQUIRE(find(table, *item) == nullptr);
    gone.clear();
  }
}

TEST_CASE("the child table agrees with a list of its items after every event") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    fuzz(seed, 4, fuzz_length(2000));
    fuzz(seed, 1000, fuzz_length(4000));
    fuzz(seed, std::uint64_t{1} << 60U, fuzz_length(4000));
  }
}

}  // namespace
