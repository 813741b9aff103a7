// Quotas while blocks are on their way to DRAM: between the steps of a move.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/blocks/quotas.h"
#include "kvpool/pool/pending_swap_in.h"
#include "kvpool/pool/prompt_cache.h"
#include "pool_fixture.h"
#include "thrown.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

constexpr QuotaRule kFree{0, UINT32_MAX, 0};

// Two models without pools, so that a test can stop between the steps of a move: `moving` has cached a prompt of eight
// blocks, and the other has reserved four of the twelve.
struct StoppedMove {
  struct One {
    explicit One(BlockSpace& space) : blocks(space, {}), cache(blocks, kPage, EvictionPolicy::kLru, false) {}
    CacheBlocks blocks;
    PromptCache cache;
  };

  StoppedMove() : space(units(), 3), moving((space.enforce_quotas(), space)), other(space) {
    set(moving, 0);
    set(other, 4);
    const SpaceLock lock = space.lock();
    REQUIRE(moving.blocks.take_within(8, Medium::kHbm, BlockState::kActive, blocks.data()));
    unpin(insert());
  }

  static MediumMap<std::uint32_t> units() {
    MediumMap<std::uint32_t> units{};
    units[Medium::kHbm] = 12;
    units[Medium::kDram] = 8;
    return units;
  }

  void set(const One& model, std::uint32_t reserve) {
    MediumMap<QuotaRule> rules{};
    rules[Medium::kHbm] = {reserve, UINT32_MAX, 0};
    rules[Medium::kDram] = kFree;
    const SpaceLock lock = space.lock();
    space.set_rules(model.blocks.number(), rules, "model " + std::to_string(model.blocks.number()));
  }

  IndexPin insert() {
    Addresses canonical(8);
    const InsertItem item{tokens.data(), tokens.size(), blocks.data(), blocks.size(), canonical.data()};
    return moving.cache.insert("", {&item, 1}, false)[0].pin;
  }

  IndexHit match() { return moving.cache.match("", tokens.data(), tokens.size(), Addresses(8).data()); }
  void unpin(const IndexPin& pin) { moving.cache.unpin(&pin, 1); }

  BlockSpace space;
  One moving;
  One other;
  const Tokens tokens = prompt(1, 8);
  Addresses blocks = Addresses(8);
};

}  // namespace

TEST_CASE("a block that is pinned on its way to DRAM is active for every check from then on") {
  StoppedMove stopped;
  {
    const SpaceLock lock = stopped.space.lock();
    PromptCache::MoveOut move = stopped.moving.cache.begin_move_out(8);
    CHECK(stopped.other.blocks.takeable(12, Medium::kHbm) == 4);  // more, when the move is over
    const IndexHit hit = stopped.match();
    CHECK(hit.pages == 8);  // they fit, moving or not
    CHECK(stopped.space.quota_tier(Medium::kHbm).models[stopped.moving.blocks.number()].active == 8);
    CHECK(stopped.moving.blocks.takeable(1, Medium::kHbm) == 0);
    CHECK_NOTHROW(stopped.space.audit());
    CHECK(stopped.moving.cache.finish_move_out(move, nullptr) == 0);
    CHECK_NOTHROW(stopped.space.audit());
    CHECK_NOTHROW(stopped.moving.cache.audit());
    stopped.unpin(hit.pin);
    CHECK(stopped.space.quota_tier(Medium::kHbm).models[stopped.moving.blocks.number()].historical == 8);
  }
  SUBCASE("no reserve is promised that pins during a move have used up") {
    PromptCache::MoveOut move;
    {
      const SpaceLock lock = stopped.space.lock();
      move = stopped.moving.cache.begin_move_out(8);
      CHECK(stopped.match().pages == 8);
    }
    CHECK(code_of([&] { stopped.set(stopped.other, 5); }) == ErrorCode::kOutOfBlocks);
    const SpaceLock lock = stopped.space.lock();
    stopped.moving.cache.cancel_move_out(move);
    CHECK_NOTHROW(stopped.space.audit());
    CHECK_NOTHROW(stopped.moving.cache.audit());
  }
}

TEST_CASE("a pin that ends during a move counts no more, and the move goes on") {
  StoppedMove stopped;
  const SpaceLock lock = stopped.space.lock();
  PromptCache::MoveOut move = stopped.moving.cache.begin_move_out(8);
  stopped.unpin(stopped.match().pin);
  CHECK_NOTHROW(stopped.moving.cache.audit());
  CHECK(stopped.moving.cache.finish_move_out(move, nullptr) == 8);
  CHECK(stopped.space.quota_tier(Medium::kHbm).models[stopped.moving.blocks.number()].active == 0);
  CHECK(stopped.space.quota_tier(Medium::kDram).models[stopped.moving.blocks.number()].historical == 8);
  CHECK_NOTHROW(stopped.moving.cache.audit());
}

TEST_CASE("an insertion and a swap in pin nothing on its way to DRAM that others' reserves need") {
  StoppedMove stopped;
  const SpaceLock lock = stopped.space.lock();
  Addresses taken(4);
  REQUIRE(stopped.other.blocks.take_within(4, Medium::kHbm, BlockState::kActive, taken.data()));
  PromptCache::MoveOut move = stopped.moving.cache.begin_move_out(8);
  // Others have taken all that the eight blocks would leave.
  MediumMap<QuotaRule> rules{};
  rules[Medium::kHbm] = {8, UINT32_MAX, 0};
  rules[Medium::kDram] = kFree;
  stopped.space.set_rules(stopped.other.blocks.number(), rules, "other");
  CHECK(error_of([&] { stopped.insert(); })->cause() == ErrorCause::kQuota);
  PendingSwapIn pending;
  CHECK(error_of([&] { stopped.moving.cache.begin_move_in(stopped.blocks, {}, pending); })->cause() ==
        ErrorCause::kQuota);
  CHECK(stopped.match().pages == 4);
  CHECK_NOTHROW(stopped.space.audit());
  stopped.moving.cache.cancel_move_out(move);
  CHECK_NOTHROW(stopped.moving.cache.audit());
}
