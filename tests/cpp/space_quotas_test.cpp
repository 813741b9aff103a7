// Quotas: a space of several pools keeps to them.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/quotas.h"
#include "kvpool/pool/peer_claims.h"
#include "kvpool/pool/shared_space.h"
#include "quota_space_kit.h"
#include "thrown.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

// Caches 16 prompts in a space of 16 units, and pins three, between which there are four units next to each other once.
std::vector<Found> fill_but_for_one_place(const std::shared_ptr<Pool>& small) {
  cache(small, 0, 16);
  std::vector<Found> pinned;
  for (const Token id : {0, 4, 12}) pinned.push_back(match(small, prompt(id, 1)));
  return pinned;
}

constexpr QuotaRule kFree{0, UINT32_MAX, 0};

}  // namespace

TEST_CASE("a pool without rules may have nothing, and rules that cannot hold are refused with nothing changed") {
  Models models(24, 8);
  PoolOptions options = small_options(0, 0);
  options.layout.piece_bytes = {kUnit};
  const auto bare = std::make_shared<Pool>(options, models.shared.share(options.layout));
  CHECK(refusal(*bare, 1)->cause() == ErrorCause::kQuota);

  const auto a = models.load(3, {12, 24, 0});
  const auto b = models.load(4, {8, 24, 0});
  CHECK(code_of([&] { models.set(*b, {13, 24, 0}); }) == ErrorCode::kArgument);  // with 12 that is 25
  CHECK(code_of([&] { models.set(*b, {8, 7, 0}); }) == ErrorCode::kArgument);
  CHECK(models.of(*b).rule.reserve == 8);

  const Addresses busy = alloc(*a, 5);  // 15 active
  const auto full = error_of([&] { models.set(*b, {12, 24, 0}); });
  REQUIRE(full);
  CHECK(full->cause() == ErrorCause::kQuota);
  CHECK(models.of(*b).rule.reserve == 8);
  a->free(busy.data(), busy.size());
  models.set(*b, {12, 24, 0});
  models.audit();
}

TEST_CASE("a model gets its reserve by eviction alone, and what others have active or reserved is refused to it") {
  Models models(24, 0);
  const auto a = models.load(3, {12, UINT32_MAX, 12});
  const auto b = models.load(4, {8, UINT32_MAX, 12});
  cache(a, 0, 8);  // all of the space
  CHECK(models.of(*a).historical == 24);
  const Addresses mine = alloc(*b, 2);
  CHECK(models.of(*a).historical >= 12);
  CHECK(models.of(*b).active == 8);
  const auto refused = refusal(*b, 2);  // 16 of 24, and 12 are reserved
  REQUIRE(refused);
  CHECK(refused->code() == ErrorCode::kOutOfBlocks);
  CHECK(refused->cause() == ErrorCause::kQuota);
  CHECK(refused->model() == "model 1");
  CHECK(field(*refused, "requested") == 8);
  CHECK(field(*refused, "reserve") == 8);
  CHECK(field(*refused, "capacity") == 24);
  CHECK(models.of(*b).active == 8);
  CHECK(models.of(*a).historical >= 12);  // a reserve that is cached is not taken either
  models.audit();
}

TEST_CASE("a limit counts the cache too, and a raised limit lets a model grow again") {
  Models models(24, 0);
  const auto a = models.load(3, {0, 9, 0});
  cache(a, 0, 3);
  Addresses more(1);
  CHECK(!a->try_alloc(1, Medium::kHbm, more.data()));  // the space has room, the model has not
  more = alloc(*a, 2);                                 // its own cache makes room
  CHECK(models.of(*a).active + models.of(*a).historical == 9);
  CHECK(refusal(*a, 2)->cause() == ErrorCause::kQuota);
  models.set(*a, {0, 12, 0});
  const Addresses grown = alloc(*a, 2);
  CHECK(models.of(*a).active == 12);
  models.set(*a, {0, 6, 0});  // takes nothing that is active
  CHECK(models.of(*a).active == 12);
  CHECK(refusal(*a, 1)->cause() == ErrorCause::kQuota);
}

TEST_CASE("the neighbour furthest beyond its quota is evicted before the own cache, and to DRAM if its quota allows") {
  Models models(24, 24);
  const auto a = models.load(3, {0, UINT32_MAX, 3}, {0, UINT32_MAX, 6});
  const auto b = models.load(3, {0, UINT32_MAX, 12}, {0, UINT32_MAX, 12});
  cache(b, 0, 4);    // at its quota
  cache(a, 100, 4);  // beyond its quota
  const Addresses some = alloc(*b, 3);
  CHECK(models.of(*a).historical == 3);
  CHECK(models.of(*b).historical == 12);
  CHECK(models.of(*a, Medium::kDram).historical == 6);  // of nine units; the coldest was dropped
  CHECK(match(a, prompt(100, 1)).hit.pages == 0);
  CHECK(match(a, prompt(101, 1)).hit.pages == 1);
  models.audit();
}

TEST_CASE("pins are admitted like allocations: a hit ends where a neighbour's reserve begins") {
  Models models(24, 0);
  const auto a = models.load(3, {0, UINT32_MAX, 0});
  const auto b = models.load(3, {12, UINT32_MAX, 12});
  const Tokens first = prompt(1, 4);
  const Tokens second = prompt(2, 4);
  insert(a, first, alloc(*a, 4));
  insert(a, second, alloc(*a, 4));
  REQUIRE(models.of(*a).historical == 24);

  {
    const Found all = match(a, first);
    CHECK(all.hit.pages == 4);
    CHECK(match(a, second).hit.pages == 0);
    CHECK(match(a, first).hit.pages == 4);  // what is pinned already costs nothing
    models.audit();
  }
  const Tokens half(first.begin(), first.begin() + 2 * kPage);
  const Found two = match(a, half);
  CHECK(two.hit.pages == 2);
  CHECK(match(a, second).hit.pages == 2);
  CHECK(alloc(*b, 4).size() == 4);  // its reserve is there at all times
  models.audit();
}

TEST_CASE("an insertion whose pins the quotas do not admit leaves everything as it was") {
  Models models(24, 0);
  const auto a = models.load(3, kFree);
  const auto b = models.load(3, {12, UINT32_MAX, 12});
  const Tokens cached = prompt(2, 1);
  insert(a, cached, alloc(*a, 1));
  const Addresses mine = alloc(*a, 4);
  const auto before = models.of(*a);
  const auto refused = error_of([&] { insert(a, cached, {mine[0]}); });
  REQUIRE(refused);
  CHECK(refused->cause() == ErrorCause::kQuota);
  CHECK(models.of(*a).active == before.active);
  CHECK(models.of(*a).historical == before.historical);
  models.audit();
  // The duplicate that is freed makes up for the pin.
  const Held held = insert(a, cached, {mine[0]}, "", /*free_duplicates=*/true);
  CHECK(models.of(*a).active == before.active);
  a->free(&mine[1], 3);
  CHECK(alloc(*b, 4).size() == 4);
}

TEST_CASE("when no place is free although memory suffices, the neighbours in one place are evicted") {
  Models models(16, 0);
  const auto small = models.load(1, {0, UINT32_MAX, 16});
  const auto large = models.load(4, {4, UINT32_MAX, 0});
  const std::vector<Found> pinned = fill_but_for_one_place(small);
  const Addresses mine = alloc(*large, 1);
  const std::uint32_t first = block_of(mine[0]);  // unit
  for (const Found& found : pinned) {
    const std::uint32_t unit = block_of(found.addresses[0]);
    CHECK((unit < first || unit >= first + 4));
  }
  CHECK(models.of(*small).active == 3);
  const auto refused = refusal(*large, 1);
  REQUIRE(refused);
  CHECK(refused->code() == ErrorCode::kOutOfBlocks);
  CHECK(refused->cause() != ErrorCause::kQuota);  // the quotas would admit it
  CHECK(field(*refused, "fragmented") == 1);
  CHECK(field(*refused, "largest_run") >= 3);
  models.audit();
}

TEST_CASE("no place is cleared that would cost a neighbour a part of its reserve with the rest of a prompt") {
  Models models(16, 0);
  const auto small = models.load(1, {8, UINT32_MAX, 0});
  const auto large = models.load(4, {0, UINT32_MAX, 0});
  // One prompt, whose first four pages lie in four places: what continues any of them is most of it.
  Addresses blocks = alloc(*small, 16);
  std::sort(blocks.begin(), blocks.end(), [](Address a, Address b) {
    return std::pair(block_of(a) % 4, block_of(a)) < std::pair(block_of(b) % 4, block_of(b));
  });
  insert(small, prompt(1, 16), blocks);
  const auto refused = refusal(*large, 1);
  REQUIRE(refused);
  CHECK(field(*refused, "fragmented") == 1);
  CHECK(models.of(*small).historical >= 8);

  models.set(*small, {0, UINT32_MAX, 0});
  CHECK(alloc(*large, 1).size() == 1);
  models.audit();
}

TEST_CASE("MIXED takes HBM as far as the quotas admit, and DRAM for the rest") {
  Models models(12, 12);
  const auto a = models.load(3, {0, 6, 0});
  const auto b = models.load(3, {6, UINT32_MAX, 6});
  cache(b, 0, 2);
  const Addresses both = alloc(*a, 4, kMixed);
  CHECK(std::count_if(both.begin(), both.end(), [](Address at) { return medium_of(at) == Medium::kHbm; }) == 2);
  CHECK(refusal(*a, 5, kMixed)->cause() == ErrorCause::kQuota);
  CHECK(alloc(*a, 2, kMixed).size() == 2);
  models.audit();
}

TEST_CASE("a model whose growth is held has no more blocks, and finds only what is pinned") {
  Models models(24, 0);
  const auto a = models.load(3, kFree);
  const Held held = insert(a, prompt(1, 2), alloc(*a, 2));
  insert(a, prompt(2, 2), alloc(*a, 2));
  {
    const SpaceLock lock = models.shared.space().lock();
    models.shared.space().hold_growth(a->space_number(), true);
  }
  CHECK(refusal(*a, 1)->cause() == ErrorCause::kQuota);
  CHECK(match(a, prompt(1, 2)).hit.pages == 2);
  CHECK(match(a, prompt(2, 2)).hit.pages == 0);
}

TEST_CASE("a pool that is closed gives its cache and its reserve back at once") {
  Models models(24, 24);
  const auto a = models.load(3, {12, UINT32_MAX, 12});
  const auto b = models.load(4, kFree);
  cache(a, 0, 8);
  a->swap_out(2);
  a->close();
  CHECK(alloc(*b, 6).size() == 6);
  CHECK(alloc(*b, 6, Medium::kDram).size() == 6);
  models.audit();
}

TEST_CASE("cached blocks that a transfer reads are given up, and the quotas hold until it has read them") {
  Models models(24, 0);
  const auto a = models.load(3, {0, UINT32_MAX, 0});
  const auto b = models.load(3, {12, UINT32_MAX, 24});
  Held held = insert(a, prompt(1, 4), alloc(*a, 4));
  const Addresses read = held.canonical;
  a->for_peers().hold_for_reading(read.data(), read.size(), 7);
  held.pins = Pins();
  cache(a, 100, 4);
  models.set(*b, {24, UINT32_MAX, 24});
  CHECK(refusal(*b, 8).has_value());  // everything was evicted, and half of it is still read
  models.audit();
  a->for_peers().release_reading(read.data(), read.size());
  CHECK(alloc(*b, 8).size() == 8);
  models.audit();
}

TEST_CASE("an address of another model belongs to another, also after its units have changed hands") {
  Models models(24, 0);
  const auto a = models.load(3, kFree);
  const auto b = models.load(3, kFree);
  const Addresses its = alloc(*a, 8);
  CHECK(code_of([&] { b->free(its.data(), 1); }) == ErrorCode::kNotOwner);
  a->free(its.data(), its.size());
  const Addresses mine = alloc(*b, 8);
  CHECK(code_of([&] { a->free(its.data(), 1); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { b->free(its.data(), 1); }) == ErrorCode::kNotOwner);
  b->free(mine.data(), mine.size());
  models.audit();
}

TEST_CASE("models that allocate at once always get their reserves") {
  Models models(96, 48);
  std::array<std::shared_ptr<Pool>, 3> pools;
  constexpr std::array<std::uint32_t, 3> kSizes{3, 4, 6};
  for (std::size_t i = 0; i < pools.size(); ++i) {
    pools[i] = models.load(kSizes[i], {24, UINT32_MAX, 32}, {0, UINT32_MAX, 16}, /*audit=*/false);
  }
  std::array<std::atomic<int>, 3> refused{};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < pools.size(); ++i) {
    threads.emplace_back([&, i] {
      const std::size_t reserve = 24 / kSizes[i];
      for (Token round = 0; round < 300; ++round) {
        Addresses blocks(reserve);
        const auto error = error_of([&] { pools[i]->alloc_evicting(reserve, Medium::kHbm, blocks.data()); });
        if (error) {
          // Fragmentation is the one reason that is left.
          refused[i] += error->cause() == ErrorCause::kQuota ? 1 : 0;
          continue;
        }
        insert(pools[i], prompt(static_cast<Token>(i * 1000) + round, reserve), blocks);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& each : refused) CHECK(each == 0);
  models.audit();
  for (const auto& pool : pools) pool->audit();
}

TEST_CASE("the cache of a closed pool goes with its last pins, and the pool gets no quotas any more") {
  Models models(24, 0);
  const auto a = models.load(3, {12, UINT32_MAX, 12});
  const auto b = models.load(4, kFree);
  Held held = insert(a, prompt(1, 4), alloc(*a, 4));
  const Found found = match(a, prompt(1, 2));
  cache(a, 100, 4);
  a->close();
  CHECK(models.of(*a).active == 12);
  CHECK(models.of(*a).historical == 0);
  CHECK(code_of([&] { models.set(*a, {12, UINT32_MAX, 12}); }) == ErrorCode::kState);
  held.pins = Pins();
  CHECK(models.of(*a).active == 6);  // what the match has pinned
  CHECK(models.of(*a).historical == 0);
  models.audit();
  CHECK(alloc(*b, 4).size() == 4);  // all but those six units, which lie together
}

TEST_CASE("a failure for want of places drops nothing when it can be seen beforehand") {
  Models models(16, 0);
  const auto small = models.load(1, {0, UINT32_MAX, 16});
  const auto large = models.load(4, {4, UINT32_MAX, 0});
  const std::vector<Found> pinned = fill_but_for_one_place(small);
  const auto refused = refusal(*large, 2);
  REQUIRE(refused);
  CHECK(field(*refused, "fragmented") == 1);
  CHECK(models.of(*small).historical == 13);
  CHECK(alloc(*large, 1).size() == 1);
  models.audit();
}

TEST_CASE("a pool that has ended takes no part any more when others make room") {
  Models models(24, 0);
  const auto b = models.load(3, kFree);
  {
    const auto a = models.load(1, {0, UINT32_MAX, 0});
    cache(a, 0, 12);
  }
  cache(b, 100, 8);
  CHECK(alloc(*b, 8).size() == 8);
  models.audit();
}
