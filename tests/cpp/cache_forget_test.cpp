// Cached blocks that a pool is told to forget, pinned or not.
#include <doctest/doctest.h>

#include <thread>

#include "failing_alloc.h"
#include "kvpool/base/error.h"
#include "kvpool/index/event_log.h"
#include "kvpool/pool/peer_claims.h"
#include "kvpool/pool/pool.h"
#include "pool_fixture.h"
#include "swap_kit.h"
#include "thrown.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

std::shared_ptr<Pool> make_pool(std::uint32_t hbm, std::uint32_t dram) {
  PoolOptions options = small_options(hbm, dram);
  options.audit = true;
  return std::make_shared<Pool>(options);
}

std::uint32_t cached(Pool& pool) { return count(pool, Medium::kHbm, BlockState::kHistorical); }
std::uint32_t free_blocks(Pool& pool) { return count(pool, Medium::kHbm, BlockState::kFree); }

// One page of the prompt `id` after another prompt.
Tokens continued(Tokens tokens, Token id) {
  const Tokens page = prompt(id, 1);
  tokens.insert(tokens.end(), page.begin(), page.end());
  return tokens;
}

}  // namespace

TEST_CASE("forget drops blocks and what continues them, and leaves what precedes and what branches off before") {
  const auto pool = make_pool(12, 0);
  const Addresses blocks = alloc(*pool, 6);
  insert(pool, prompt(1, 4), {blocks[0], blocks[1], blocks[2], blocks[3]});
  insert(pool, continued(prompt(1, 3), 7), {blocks[0], blocks[1], blocks[2], blocks[4]});  // behind the third
  insert(pool, continued(prompt(1, 1), 8), {blocks[0], blocks[5]});                        // behind the first
  CHECK(pool->forget({&blocks[1], 1}) == 4);
  CHECK(match(pool, prompt(1, 4)).hit.pages == 1);
  CHECK(match(pool, continued(prompt(1, 1), 8)).hit.pages == 2);
  CHECK(cached(*pool) == 2);
  CHECK(free_blocks(*pool) == 10);
}

TEST_CASE("a pinned block that is forgotten is found no more, and free when the last pin goes") {
  const auto pool = make_pool(8, 0);
  const Addresses blocks = alloc(*pool, 4);
  for (std::size_t i = 0; i < 4; ++i) stamp(*pool, blocks[i], 70 + i);
  insert(pool, prompt(1, 4), blocks);
  Found whole = match(pool, prompt(1, 4));
  Found part = match(pool, prompt(1, 3));
  CHECK(pool->forget({&blocks[2], 1}) == 2);
  CHECK(match(pool, prompt(1, 4)).hit.pages == 2);
  CHECK(free_blocks(*pool) == 4);
  CHECK(pool->evict(8, Medium::kHbm) == 0);  // what precedes them is pinned still

  SUBCASE("the same prompt can be cached again meanwhile") {
    const Addresses fresh = alloc(*pool, 4);
    const Held again = insert(pool, prompt(1, 4), {blocks[0], blocks[1], fresh[0], fresh[1]});
    CHECK(again.outcome.inserted == 2);
    CHECK(match(pool, prompt(1, 4)).addresses == Addresses{blocks[0], blocks[1], fresh[0], fresh[1]});
    CHECK(has_stamp(*pool, whole.addresses[2], 72));
    pool->free(&fresh[2], 2);
  }
  SUBCASE("what precedes them can be cut and forgotten, too") {
    CHECK(match(pool, prompt(1, 1)).hit.pages == 1);
    CHECK(pool->forget({&blocks[0], 1}) == 2);
    CHECK(match(pool, prompt(1, 4)).hit.pages == 0);
    CHECK(cached(*pool) == 4);
  }
  SUBCASE("of some, a pin is left") {
    part.pins.release();
    CHECK(cached(*pool) == 4);
  }
  for (std::size_t i = 0; i < 4; ++i) CHECK(has_stamp(*pool, blocks[i], 70 + i));
  whole.pins.release();
  part.pins.release();
  pool->evict(8, Medium::kHbm);
  CHECK(free_blocks(*pool) == 8);
  pool->audit();
}

TEST_CASE("forget takes blocks in any order, also twice and gone already, and refuses others before it drops any") {
  const auto pool = make_pool(8, 0);
  const Addresses blocks = alloc(*pool, 5);
  insert(pool, prompt(1, 4), {blocks[0], blocks[1], blocks[2], blocks[3]});
  const auto refused = [&](Address bad) {
    const Addresses list = {blocks[3], bad};
    return code_of([&] { pool->forget(list); });
  };
  CHECK(refused(blocks[4]) == ErrorCode::kState);  // the caller's
  CHECK(refused(make_address(7, Medium::kHbm, 1, 0)) == ErrorCode::kNotOwner);
  CHECK(refused(make_address(0, Medium::kHbm, 1, 4000)) == ErrorCode::kArgument);
  CHECK(refused(0) == ErrorCode::kArgument);
  CHECK(cached(*pool) == 4);
  CHECK(pool->forget({}) == 0);
  const Addresses list = {blocks[3], blocks[1], blocks[3], blocks[2]};
  CHECK(pool->forget(list) == 3);
  CHECK(pool->forget(list) == 0);
  CHECK(match(pool, prompt(1, 4)).hit.pages == 1);
  pool->close();
  CHECK(code_of([&] { pool->forget(list); }) == ErrorCode::kClosed);
}

// It used to follow the tag of such a block as if the index still had it.
TEST_CASE("forget drops blocks that something still reads, once, and skips them when it is called again") {
  const auto pool = make_pool(8, 0);
  const Addresses blocks = alloc(*pool, 3);
  insert(pool, prompt(1, 3), blocks);
  pool->for_peers().hold_for_reading(&blocks[1], 1, 0);
  SUBCASE("all are named") { CHECK(pool->forget(blocks) == 3); }
  SUBCASE("the one before is named") { CHECK(pool->forget({blocks.data(), 1}) == 3); }
  SUBCASE("the one after is named first") {
    const Addresses list = {blocks[2], blocks[1]};
    CHECK(pool->forget(list) == 2);
  }
  CHECK(pool->forget({&blocks[1], 1}) == 0);
  pool->forget(blocks);
  CHECK(match(pool, prompt(1, 3)).hit.pages == 0);
  CHECK(free_blocks(*pool) == 7);
  pool->for_peers().release_reading(&blocks[1], 1);
  CHECK(free_blocks(*pool) == 8);
  pool->audit();
}

// It used to cut a prompt before each of them, which took time by the square of their number.
TEST_CASE("forget cuts a prompt once, whichever of its blocks are named") {
  const auto pool = make_pool(64, 0);
  const Addresses blocks = alloc(*pool, 64);
  insert(pool, prompt(1, 64), blocks);
  Found found = match(pool, prompt(1, 64));
  const auto events = pool->subscribe(1 << 20, /*include_cached=*/false);
  Addresses list;
  for (std::size_t i = 63; i > 20; i -= 2) list.push_back(blocks[i]);
  CHECK(pool->forget(list) == 43);  // from the 22nd on
  CHECK(pool->drain(*events).events.size() == 1);
  CHECK(match(pool, prompt(1, 64)).hit.pages == 21);
  found.pins.release();
  CHECK(free_blocks(*pool) == 43);
}

TEST_CASE("a peer cannot begin to read what was forgotten, also if it has matched it before") {
  const auto pool = make_pool(4, 0);
  const Addresses blocks = alloc(*pool, 3);
  insert(pool, prompt(1, 2), {blocks[0], blocks[1]});
  PeerClaims& claims = pool->for_peers();
  const Found found = match(pool, prompt(1, 2));
  CHECK(pool->forget({&blocks[1], 1}) == 1);
  CHECK(code_of([&] { claims.hold_for_reading(blocks.data(), 2, 77); }) == ErrorCode::kStaleAddress);
  claims.hold_for_reading(blocks.data(), 2, 0);  // its own pool may: it has the pins
  claims.release_reading(blocks.data(), 2);
  pool->free(&blocks[2], 1);
  claims.hold_for_reading(blocks.data(), 1, 77);
  claims.release_reading(blocks.data(), 1);
  pool->evict(4, Medium::kHbm);
  CHECK(cached(*pool) == 2);  // pinned, and nothing reads them
}

TEST_CASE("forget changes nothing when memory runs out") {
  const int threw = fail_each_allocation([&](auto&& fail) {
    const auto pool = std::make_shared<Pool>(small_options(8, 0));
    const Addresses blocks = alloc(*pool, 4);
    insert(pool, prompt(1, 4), blocks);
    const Addresses list = {blocks[3], blocks[1]};
    const bool failed = fail([&] { pool->forget(list); });
    CHECK(match(pool, prompt(1, 4)).hit.pages == (failed ? 4 : 1));
    pool->audit();
  });
  CHECK(threw > 0);
}

TEST_CASE("of a page that was swapped in, forget takes its old address, and the old blocks wait for their pins") {
  const auto pool = make_pool(4, 4);
  const Addresses blocks = alloc(*pool, 2);
  insert(pool, prompt(1, 2), blocks);
  REQUIRE(pool->swap_out(2).size() == 2);
  Found before = match(pool, prompt(1, 2));
  Addresses hot(2);
  Pins pins(pool, pool->swap_in(before.addresses, {}, hot.data()));
  CHECK(pool->forget(before.addresses) == 2);
  CHECK(match(pool, prompt(1, 2)).hit.pages == 0);
  CHECK(count(*pool, Medium::kDram, BlockState::kHistorical) == 2);
  before.pins.release();
  CHECK(count(*pool, Medium::kDram, BlockState::kFree) == 4);
  CHECK(cached(*pool) == 2);
  pins.release();
  CHECK(free_blocks(*pool) == 4);
  pool->audit();
}

TEST_CASE("a page that was forgotten is not swapped in, also if the swap was under way") {
  HeldPool held(8, 8);
  const Tokens cold = held.store(1, 4, Medium::kDram);
  Found found = match(held.pool, cold);
  held.mover.hold(TierWay::kIn, true);
  const auto swap = held.pool->begin_swap_in(found.addresses, {});
  REQUIRE(held.mover.begun(TierWay::kIn));
  CHECK(held.pool->forget({&found.addresses[2], 1}) == 2);
  held.mover.hold(TierWay::kIn, false);
  REQUIRE(eventually([&] { return swap->done(); }));
  CHECK(code_of([&] { swap->rethrow_if_failed(); }) == ErrorCode::kState);
  Addresses out(4);
  CHECK(code_of([&] { held.pool->swap_in(found.addresses, {}, out.data()); }) == ErrorCode::kState);
  CHECK(match(held.pool, cold).addresses == Addresses(found.addresses.begin(), found.addresses.begin() + 2));
  CHECK(held.count(Medium::kDram, BlockState::kHistorical) == 4);
  found.pins.release();
  CHECK(held.count(Medium::kDram, BlockState::kHistorical) == 2);
  CHECK(held.count(Medium::kHbm, BlockState::kFree) == 8);
  held.pool->audit();
}

TEST_CASE("threads that match, forget and insert the same prompts lose no block and read no other's") {
  const auto pool = std::make_shared<Pool>(small_options(64, 16));
  constexpr int kSteps = 400;
  const auto work = [&](std::uint64_t seed) {
    for (int step = 0; step < kSteps; ++step) {
      const Tokens tokens = prompt(static_cast<Token>((seed + static_cast<std::uint64_t>(step)) % 3), 4);
      Found found = match(pool, tokens);
      if (found.hit.pages == 4 && (step + seed) % 2 == 0) {
        pool->forget({&found.addresses[static_cast<std::size_t>(step) % 4], 1});
        // Pinned here: no other thread gets these blocks, although they are forgotten.
        for (const Address address : found.addresses) CHECK(has_stamp(*pool, address, address));
        continue;
      }
      Addresses all = found.addresses;
      for (const Address address : alloc(*pool, 4 - all.size())) {
        stamp(*pool, address, address);
        all.push_back(address);
      }
      try {
        insert(pool, tokens, all, "", /*free_duplicates=*/true);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kState);  // the prefix was forgotten since
        pool->free(all.data() + found.hit.pages, 4 - found.hit.pages);
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  pool->audit();
  pool->evict(64, kMixed);
  CHECK(free_blocks(*pool) == 64);
}
