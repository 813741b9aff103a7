// Insertions of blocks whose content is still to come.
#include <doctest/doctest.h>

#include <span>

#include "failing_alloc.h"
#include "kvpool/base/error.h"
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

Held insert_unfilled(const std::shared_ptr<Pool>& pool, const Tokens& tokens, const Addresses& addresses) {
  Held held;
  held.canonical.resize(addresses.size());
  const InsertItem item{tokens.data(), tokens.size(), addresses.data(), addresses.size(), held.canonical.data()};
  held.outcome = pool->insert_unfilled("", item, /*free_duplicates=*/true);
  held.pins = Pins(pool, held.outcome.pin);
  return held;
}

// How many pages a peer finds.
std::size_t pages_for_peer(const std::shared_ptr<Pool>& pool, const Tokens& tokens) {
  Addresses out(tokens.size() / kPage);
  const IndexHit hit = pool->for_peers().match("", tokens.data(), tokens.size(), out.data());
  const Pins pins(pool, hit.pin);
  return hit.pages;
}

}  // namespace

TEST_CASE("blocks whose content is to come are matched here, and end what a peer finds") {
  const auto pool = make_pool(8, 0);
  const Addresses blocks = alloc(*pool, 5);
  insert(pool, prompt(1, 2), {blocks[0], blocks[1]});
  insert_unfilled(pool, prompt(1, 4), {blocks[0], blocks[1], blocks[2], blocks[3]});
  insert(pool, prompt(1, 5), blocks);  // its own block is there
  CHECK(match(pool, prompt(1, 5)).addresses == blocks);
  CHECK(pages_for_peer(pool, prompt(1, 5)) == 2);
  pool->filled({&blocks[2], 1});
  CHECK(pages_for_peer(pool, prompt(1, 5)) == 3);
  pool->filled({&blocks[3], 1});
  CHECK(pages_for_peer(pool, prompt(1, 5)) == 5);
  CHECK(pool->evict(8, Medium::kHbm) == 5);
}

TEST_CASE("nothing reads, moves, evicts or deletes a block that is being filled") {
  const auto pool = make_pool(8, 8);
  const Addresses blocks = alloc(*pool, 2, Medium::kDram);
  insert_unfilled(pool, prompt(1, 2), blocks);
  Addresses out = alloc(*pool, 2);
  CHECK(code_of([&] { pool->for_peers().hold_for_reading(blocks.data(), 2, 0); }) == ErrorCode::kBusy);
  CHECK(code_of([&] { pool->for_peers().hold_for_reading(blocks.data(), 2, 77); }) == ErrorCode::kBusy);
  CHECK(code_of([&] { pool->copy(TierWay::kIn, blocks, out); }) == ErrorCode::kBusy);
  Addresses hot(2);
  CHECK(code_of([&] { pool->swap_in(blocks, {}, hot.data()); }) == ErrorCode::kBusy);
  CHECK(code_of([&] { pool->begin_swap_in(blocks, {}); }) == ErrorCode::kBusy);
  CHECK(pool->evict(8, kMixed) == 0);
  const Tokens tokens = prompt(1, 2);
  CHECK(code_of([&] { pool->erase("", tokens.data(), tokens.size(), true); }) == ErrorCode::kState);
  CHECK(code_of([&] { alloc(*pool, 7, Medium::kDram); }) == ErrorCode::kOutOfBlocks);
  pool->filled(blocks);
  pool->copy(TierWay::kIn, blocks, out);
  CHECK(alloc(*pool, 7, Medium::kDram).size() == 7);  // one of them was evicted
}

TEST_CASE("HBM blocks that are being filled stay there when room is made") {
  const auto pool = make_pool(4, 4);
  const Addresses blocks = alloc(*pool, 2);
  insert_unfilled(pool, prompt(1, 2), blocks);
  CHECK(pool->swap_out(4).empty());
  CHECK(code_of([&] { alloc(*pool, 3); }) == ErrorCode::kOutOfBlocks);
  pool->filled(blocks);
  CHECK(pool->swap_out(4).size() == 2);
}

TEST_CASE("blocks that are forgotten while they are being filled are given to nobody until that has ended") {
  const auto pool = make_pool(4, 0);
  const Addresses blocks = alloc(*pool, 2);
  insert_unfilled(pool, prompt(1, 2), blocks);
  CHECK(pool->forget(blocks) == 2);
  CHECK(match(pool, prompt(1, 2)).hit.pages == 0);
  CHECK(count(*pool, Medium::kHbm, BlockState::kFree) == 2);
  // What is cached there now is another's.
  const Addresses fresh = alloc(*pool, 2);
  insert_unfilled(pool, prompt(1, 2), fresh);
  pool->filled(blocks);
  CHECK(count(*pool, Medium::kHbm, BlockState::kFree) == 2);
  CHECK(match(pool, prompt(1, 2)).addresses == fresh);
  CHECK(pages_for_peer(pool, prompt(1, 2)) == 0);
  pool->filled(fresh);
  CHECK(pages_for_peer(pool, prompt(1, 2)) == 2);
}

// They used to become readable, by those who had matched them, with whatever lay there before.
TEST_CASE("what was forgotten before it was filled stays unreadable, and becomes free with its last pin") {
  const auto pool = make_pool(4, 0);
  const Addresses blocks = alloc(*pool, 3);
  Held held = insert_unfilled(pool, prompt(1, 3), blocks);
  pool->filled({blocks.data(), 1});
  Found found = match(pool, prompt(1, 3));
  CHECK(pool->forget(blocks) == 3);
  const auto reading = [&](std::size_t i) {
    return code_of([&] {
      pool->for_peers().hold_for_reading(&blocks[i], 1, 0);
      pool->for_peers().release_reading(&blocks[i], 1);
    });
  };
  CHECK(reading(1) == ErrorCode::kBusy);
  pool->filled({&blocks[1], 2});
  CHECK_FALSE(reading(0));
  CHECK(reading(1) == ErrorCode::kState);
  CHECK(reading(2) == ErrorCode::kState);
  CHECK(code_of([&] { pool->filled({&blocks[1], 1}); }) == ErrorCode::kState);
  pool->audit();
  found.pins.release();
  CHECK(count(*pool, Medium::kHbm, BlockState::kHistorical) == 3);
  held.pins.release();
  CHECK(count(*pool, Medium::kHbm, BlockState::kFree) == 4);
  // The blocks are as any others.
  const Addresses again = alloc(*pool, 4);
  insert(pool, prompt(2, 4), again);
  pool->for_peers().hold_for_reading(again.data(), 4, 0);
  pool->for_peers().release_reading(again.data(), 4);
}

// The number of the insertion used to stay in their marks, where a swap in finds out what is named twice.
TEST_CASE("blocks of several insertions that were filled can be swapped in") {
  const auto pool = make_pool(8, 8);
  Addresses blocks;
  for (Token id = 1; id <= 4; ++id) {
    for (const Address address : alloc(*pool, 2)) blocks.push_back(address);
    const Addresses own(blocks.end() - 2, blocks.end());
    insert_unfilled(pool, prompt(id, 2), own);
  }
  pool->filled(blocks);
  Addresses out(2);
  for (const std::size_t i : {2U, 0U, 4U, 6U}) {
    const Pins pins(pool, pool->swap_in({blocks.begin() + static_cast<std::ptrdiff_t>(i), 2}, {}, out.data()));
    CHECK(out == Addresses(blocks.begin() + static_cast<std::ptrdiff_t>(i),
                           blocks.begin() + static_cast<std::ptrdiff_t>(i) + 2));
  }
}

// They used to be dropped for the unfilled ones, which their sender was told of as if they were there.
TEST_CASE("what arrives for pages that are being filled is refused, and can come again when they are filled") {
  const auto pool = make_pool(8, 0);
  const Addresses blocks = alloc(*pool, 3);
  insert(pool, prompt(1, 1), {blocks[0]});
  insert_unfilled(pool, prompt(1, 2), {blocks[0], blocks[1]});
  Addresses arrived(2);
  REQUIRE(pool->for_peers().take(2, Medium::kHbm, BlockState::kReserved, 77, 5, false, arrived.data()));
  const Tokens tokens = prompt(1, 3);
  const auto arrive = [&] {
    Addresses all = {blocks[0], arrived[0], arrived[1]};
    Addresses canonical(3);
    const InsertItem item{tokens.data(), tokens.size(), all.data(), all.size(), canonical.data()};
    const Pins pins(pool, pool->for_peers().insert_arrived("", item, std::span(all).last(2)));
    return canonical;
  };
  CHECK(code_of([&] { arrive(); }) == ErrorCode::kBusy);
  pool->for_peers().check_reserved(arrived.data(), 2, 77, 5);
  pool->filled({&blocks[1], 1});
  CHECK(arrive() == Addresses{blocks[0], blocks[1], arrived[1]});
  CHECK(count(*pool, Medium::kHbm, BlockState::kHistorical) == 3);
}

TEST_CASE("what arrives behind a prefix that was forgotten meanwhile is refused as something that passes") {
  const auto pool = make_pool(8, 0);
  const Addresses blocks = alloc(*pool, 2);
  insert(pool, prompt(1, 1), {blocks[0]});
  const Found prefix = match(pool, prompt(1, 1));
  Addresses arrived(1);
  REQUIRE(pool->for_peers().take(1, Medium::kHbm, BlockState::kReserved, 77, 5, false, arrived.data()));
  CHECK(pool->forget({blocks.data(), 1}) == 1);
  SUBCASE("nothing is cached there") {}
  SUBCASE("something else is cached there") { insert(pool, prompt(1, 1), {blocks[1]}); }
  const Tokens tokens = prompt(1, 2);
  Addresses all = {blocks[0], arrived[0]};
  Addresses canonical(2);
  const InsertItem item{tokens.data(), tokens.size(), all.data(), all.size(), canonical.data()};
  CHECK(code_of([&] { pool->for_peers().insert_arrived("", item, std::span(all).last(1)); }) == ErrorCode::kBusy);
  pool->for_peers().check_reserved(arrived.data(), 1, 77, 5);
  CHECK(code_of([&] { insert(pool, tokens, {blocks[0], arrived[0]}); }) == ErrorCode::kState);
}

TEST_CASE("filled takes blocks of several insertions, and refuses all if one is not being filled") {
  const auto pool = make_pool(8, 0);
  const Addresses blocks = alloc(*pool, 5);
  insert_unfilled(pool, prompt(1, 2), {blocks[0], blocks[1]});
  insert_unfilled(pool, prompt(2, 1), {blocks[2]});
  insert(pool, prompt(3, 1), {blocks[3]});
  const auto refused = [&](Address bad) {
    const Addresses list = {blocks[0], blocks[2], bad};
    const auto code = code_of([&] { pool->filled(list); });
    CHECK(pages_for_peer(pool, prompt(1, 2)) == 0);
    CHECK(pages_for_peer(pool, prompt(2, 1)) == 0);
    return code;
  };
  CHECK(refused(blocks[3]) == ErrorCode::kState);  // was inserted whole
  CHECK(refused(blocks[4]) == ErrorCode::kState);  // the caller's
  CHECK(refused(blocks[0]) == ErrorCode::kState);  // twice
  CHECK(refused(make_address(7, Medium::kHbm, 1, 0)) == ErrorCode::kNotOwner);
  CHECK(refused(0) == ErrorCode::kArgument);
  pool->filled({});
  const Addresses all = {blocks[2], blocks[1], blocks[0]};
  pool->filled(all);
  CHECK(code_of([&] { pool->filled(all); }) == ErrorCode::kState);
  CHECK(pool->evict(8, Medium::kHbm) == 4);
  pool->close();
  CHECK(code_of([&] { pool->filled(all); }) == ErrorCode::kClosed);
}

TEST_CASE("an insertion that stores nothing new waits for nothing") {
  const auto pool = make_pool(4, 0);
  const Addresses blocks = alloc(*pool, 2);
  insert(pool, prompt(1, 2), blocks);
  const Held again = insert_unfilled(pool, prompt(1, 2), alloc(*pool, 2));
  CHECK(again.outcome.inserted == 0);
  CHECK(again.canonical == blocks);
  CHECK(pages_for_peer(pool, prompt(1, 2)) == 2);
  CHECK(count(*pool, Medium::kHbm, BlockState::kFree) == 2);
  const Held elsewhere = insert_unfilled(pool, prompt(2, 1), {make_address(7, Medium::kHbm, 1, 0)});
  CHECK(elsewhere.outcome.inserted == 1);
}

TEST_CASE("a prompt that is cut and continued while it is filled is filled as a whole") {
  const auto pool = make_pool(8, 0);
  const Addresses blocks = alloc(*pool, 5);
  insert_unfilled(pool, prompt(1, 4), {blocks[0], blocks[1], blocks[2], blocks[3]});
  CHECK(match(pool, prompt(1, 2)).hit.pages == 2);
  Tokens branch = prompt(1, 1);
  const Tokens tail = prompt(9, 1);
  branch.insert(branch.end(), tail.begin(), tail.end());
  insert_unfilled(pool, branch, {blocks[0], blocks[4]});
  pool->filled({&blocks[4], 1});
  CHECK(pages_for_peer(pool, branch) == 0);  // what precedes it is not there
  pool->filled({blocks.data(), 4});
  CHECK(pages_for_peer(pool, branch) == 2);
  CHECK(pages_for_peer(pool, prompt(1, 4)) == 4);
}

TEST_CASE("an insertion of blocks to be filled changes nothing when memory runs out") {
  const int threw = fail_each_allocation([&](auto&& fail) {
    const auto pool = std::make_shared<Pool>(small_options(8, 0));
    const Addresses blocks = alloc(*pool, 2);
    const Tokens tokens = prompt(1, 2);
    Addresses canonical(2);
    const InsertItem item{tokens.data(), tokens.size(), blocks.data(), blocks.size(), canonical.data()};
    IndexPin pin;
    if (fail([&] { pin = pool->insert_unfilled("", item, false).pin; })) {
      CHECK(count(*pool, Medium::kHbm, BlockState::kActive) == 2);
      CHECK(match(pool, tokens).hit.pages == 0);
    } else {
      CHECK(count(*pool, Medium::kHbm, BlockState::kHistorical) == 2);
    }
    const Pins pins(pool, pin);
    pool->audit();
  });
  CHECK(threw > 0);
}
