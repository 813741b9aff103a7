// Swaps that a thread of the pool carries out: what holds from the call on, how they end, and that they leave nothing.
#include <doctest/doctest.h>
#include <poll.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "child_process.h"
#include "failing_alloc.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/peer_claims.h"
#include "kvpool/pool/swap_handle.h"
#include "swap_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

TEST_CASE("a swap in the background moves the same blocks as a swap that the caller waits for") {
  const auto pool = std::make_shared<Pool>(small_options(8, 8));
  const Addresses blocks = alloc(*pool, 4);
  for (std::size_t i = 0; i < 4; ++i) stamp(*pool, blocks[i], 10 + i);
  insert(pool, prompt(1, 4), blocks);
  const auto out = pool->begin_swap_out(3);
  CHECK_FALSE(end_of(*out));
  CHECK(out->addresses().size() == 3);
  CHECK(all_in(out->addresses(), Medium::kDram));
  CHECK(out->take_pins().empty());
  Found found = match(pool, prompt(1, 4));
  const auto in = pool->begin_swap_in(found.addresses, {});
  found.pins.release();
  CHECK_FALSE(end_of(*in));
  CHECK(all_in(in->addresses(), Medium::kHbm));
  for (std::size_t i = 0; i < 4; ++i) CHECK(has_stamp(*pool, in->addresses()[i], 10 + i));
  Pins pins(pool, in->take_pins());
  CHECK(in->take_pins().empty());
  CHECK(pool->swap_out(4).empty());
  pins.release();
  CHECK(pool->swap_out(4).size() == 4);
  pool->audit();
}

TEST_CASE("when the call returns, the pages of a swap in are pinned and their destinations reserved") {
  HeldPool held(8, 8);
  const Tokens first = held.store(1, 1, Medium::kDram);
  const Tokens cold = held.store(2, 3, Medium::kDram);
  const Addresses into = alloc(*held.pool, 3);
  held.mover.hold(TierWay::kIn, true);
  const auto before = held.pool->begin_swap_in(match(held.pool, first).addresses, {});
  REQUIRE(held.mover.begun(TierWay::kIn));
  const auto swap = held.pool->begin_swap_in(match(held.pool, cold).addresses, into);  // its turn has not come
  CHECK(held.pool->evict(8, Medium::kDram) == 0);
  CHECK(code_of([&] { held.pool->erase("", cold.data(), cold.size(), false); }) == ErrorCode::kState);
  CHECK(code_of([&] { held.pool->free(into.data(), 1); }) == ErrorCode::kState);
  CHECK_FALSE(swap->done());
  held.mover.hold(TierWay::kIn, false);
  CHECK_FALSE(end_of(*swap));
  CHECK(swap->addresses() == into);
  CHECK(before->done());  // in the order of the calls
}

TEST_CASE("wrong arguments make the call throw, and change nothing") {
  const auto pool = std::make_shared<Pool>(small_options(8, 8));
  const Addresses blocks = alloc(*pool, 3, Medium::kDram);
  insert(pool, prompt(1, 3), blocks);
  const Addresses mine = alloc(*pool, 2);
  const auto before = states_of(*pool);
  const auto code = [&](const Addresses& addresses, const Addresses& into = {}) {
    return code_of([&] { pool->begin_swap_in(addresses, into); });
  };
  CHECK(code({blocks[0], blocks[0]}) == ErrorCode::kArgument);
  CHECK(code({blocks[0], mine[0]}) == ErrorCode::kState);
  CHECK(code({blocks[0] + (1U << 5)}) == ErrorCode::kArgument);
  CHECK(code(blocks, mine) == ErrorCode::kArgument);
  CHECK(code({blocks[0], blocks[1]}, {mine[0], mine[0]}) == ErrorCode::kArgument);
  CHECK(code_of([&] { pool->begin_swap_out(1, CuStream{}); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { pool->begin_swap_in(blocks, {}, CuStream{}); }) == ErrorCode::kArgument);
  const auto one_tier = std::make_shared<Pool>(small_options(4, 0));
  CHECK(code_of([&] { one_tier->begin_swap_out(1); }) == ErrorCode::kState);
  CHECK(states_of(*pool) == before);
}

TEST_CASE("a swap in that finds no room says so, and the pool is unchanged") {
  const auto pool = std::make_shared<Pool>(small_options(4, 8));
  insert(pool, prompt(1, 3), alloc(*pool, 3, Medium::kDram));
  const Addresses mine = alloc(*pool, 2);
  const auto before = states_of(*pool);
  const auto swap = pool->begin_swap_in(match(pool, prompt(1, 3)).addresses, {});
  CHECK(end_of(*swap) == ErrorCode::kOutOfBlocks);
  CHECK(states_of(*pool) == before);
}

TEST_CASE("blocks of the caller come back when another swap in has already brought the pages") {
  for (const std::size_t before : {std::size_t{1}, std::size_t{3}}) {
    CAPTURE(before);
    HeldPool held(8, 8);
    const Tokens cold = held.store(1, 3, Medium::kDram);
    const Addresses into = alloc(*held.pool, 3);
    const Found found = match(held.pool, cold);
    held.mover.hold(TierWay::kIn, true);
    const auto one = held.pool->begin_swap_in(std::span(found.addresses).first(before), {});
    REQUIRE(held.mover.begun(TierWay::kIn));
    const auto other = held.pool->begin_swap_in(found.addresses, into);
    held.mover.hold(TierWay::kIn, false);
    CHECK_FALSE(end_of(*one));
    CHECK_FALSE(end_of(*other));
    Addresses wanted = one->addresses();
    const std::size_t used = 3 - before;
    wanted.insert(wanted.end(), into.begin(), into.begin() + static_cast<std::ptrdiff_t>(used));
    CHECK(other->addresses() == wanted);  // so it tells which were used
    if (used > 0) CHECK(code_of([&] { held.pool->free(into.data(), 1); }) == ErrorCode::kState);
    held.pool->free(into.data() + used, into.size() - used);
    held.pool->audit();
  }
}

TEST_CASE("a swap can be cancelled until it begins, and not later") {
  HeldPool held(8, 8);
  held.store(1, 2);
  const Tokens cold = held.store(2, 2, Medium::kDram);
  for (const TierWay way : {TierWay::kOut, TierWay::kIn}) held.mover.hold(way, true);
  const auto out = held.pool->begin_swap_out(1);
  const auto in = held.pool->begin_swap_in(match(held.pool, cold).addresses, {});
  REQUIRE(held.mover.begun(TierWay::kOut));
  REQUIRE(held.mover.begun(TierWay::kIn));
  const auto later_out = held.pool->begin_swap_out(1);
  const auto later_in = held.pool->begin_swap_in(match(held.pool, cold).addresses, {});
  CHECK_FALSE(out->cancel());
  CHECK_FALSE(in->cancel());
  CHECK(later_out->cancel());
  CHECK(later_in->cancel());
  CHECK(later_in->cancel());
  for (const TierWay way : {TierWay::kOut, TierWay::kIn}) held.mover.hold(way, false);
  CHECK_FALSE(end_of(*out));
  CHECK_FALSE(end_of(*in));
  CHECK(end_of(*later_out) == ErrorCode::kCancelled);
  CHECK(end_of(*later_in) == ErrorCode::kCancelled);
  CHECK_FALSE(later_in->cancel());
  CHECK(held.count(Medium::kDram, BlockState::kHistorical) == 1);
  CHECK(held.count(Medium::kHbm, BlockState::kHistorical) == 3);
}

TEST_CASE("a swap that has ended, in any way, cannot be cancelled") {
  HeldPool held(4, 8);
  const Tokens cold = held.store(1, 3, Medium::kDram);
  const Addresses mine = alloc(*held.pool, 2);
  const auto empty = held.pool->begin_swap_out(0);
  CHECK_FALSE(end_of(*empty));
  CHECK_FALSE(empty->cancel());
  const auto failed = held.pool->begin_swap_in(match(held.pool, cold).addresses, {});
  CHECK(end_of(*failed) == ErrorCode::kOutOfBlocks);
  CHECK_FALSE(failed->cancel());
  CHECK(end_of(*failed) == ErrorCode::kOutOfBlocks);
}

TEST_CASE("closing a pool lets a copy finish, and ends swaps that have not begun") {
  HeldPool held(8, 8);
  held.store(1, 2);
  const Tokens cold = held.store(2, 2, Medium::kDram);
  const Tokens colder = held.store(3, 1, Medium::kDram);
  const Addresses into = alloc(*held.pool, 1);
  for (const TierWay way : {TierWay::kOut, TierWay::kIn}) held.mover.hold(way, true);
  const auto out = held.pool->begin_swap_out(1);
  const auto in = held.pool->begin_swap_in(match(held.pool, cold).addresses, {});
  REQUIRE(held.mover.begun(TierWay::kOut));
  REQUIRE(held.mover.begun(TierWay::kIn));
  const auto later_out = held.pool->begin_swap_out(1);
  const auto later_in = held.pool->begin_swap_in(match(held.pool, colder).addresses, into);
  std::atomic<bool> closed{false};
  std::thread close([&] {
    held.pool->close();
    closed = true;
  });
  // Swaps that begin now are closed at once, and the copies go on.
  CHECK(eventually([&] { return !held.pool->begin_swap_out(0)->cancel(); }));
  CHECK_FALSE(closed);
  for (const TierWay way : {TierWay::kOut, TierWay::kIn}) held.mover.hold(way, false);
  close.join();
  CHECK_FALSE(end_of(*out));
  CHECK_FALSE(end_of(*in));
  CHECK(all_in(in->addresses(), Medium::kHbm));
  CHECK(end_of(*later_out) == ErrorCode::kClosed);
  CHECK(end_of(*later_in) == ErrorCode::kClosed);
  CHECK(code_of([&] { held.pool->begin_swap_out(1); }) == ErrorCode::kClosed);
  CHECK(code_of([&] { held.pool->begin_swap_in({}, {}); }) == ErrorCode::kClosed);
}

TEST_CASE("dropping a handle lets its swap finish, and leaves no pins") {
  HeldPool held(8, 8);
  const Tokens cold = held.store(1, 2, Medium::kDram);
  held.mover.hold(TierWay::kIn, true);
  held.pool->begin_swap_in(match(held.pool, cold).addresses, {});
  REQUIRE(held.mover.begun(TierWay::kIn));
  held.mover.hold(TierWay::kIn, false);
  CHECK(eventually([&] { return held.pool->stats().media[Medium::kHbm].evictable == 2; }));
  held.pool->audit();
}

TEST_CASE("a handle keeps the pages that it brought until it is dropped, even after its pool is closed") {
  const auto pool = std::make_shared<Pool>(small_options(8, 8));
  insert(pool, prompt(1, 2), alloc(*pool, 2, Medium::kDram));
  auto swap = pool->begin_swap_in(match(pool, prompt(1, 2)).addresses, {});
  CHECK_FALSE(end_of(*swap));
  CHECK(pool->stats().media[Medium::kHbm].evictable == 0);
  pool->close();
  swap.reset();
}

TEST_CASE("the descriptor of a swap is readable when it is done") {
  HeldPool held(8, 8);
  held.store(1, 2);
  held.mover.hold(TierWay::kOut, true);
  const auto swap = held.pool->begin_swap_out(2);
  REQUIRE(held.mover.begun(TierWay::kOut));
  pollfd waiting{swap->done_fd(), POLLIN, 0};
  CHECK(poll(&waiting, 1, 0) == 0);
  CHECK_FALSE(swap->wait(0));
  held.mover.hold(TierWay::kOut, false);
  CHECK(poll(&waiting, 1, 60'000) == 1);
  CHECK(swap->done());
}

TEST_CASE("a swap that runs out of memory before it begins leaves the pool unchanged") {
  for (const bool out : {true, false}) {
    const int threw = fail_each_allocation([&](auto&& fail) {
      const auto pool = std::make_shared<Pool>(small_options(8, 8));
      insert(pool, prompt(1, 3), alloc(*pool, 3));
      insert(pool, prompt(2, 3), alloc(*pool, 3, Medium::kDram));
      const Addresses into = alloc(*pool, 3);
      const Addresses cold = match(pool, prompt(2, 3)).addresses;
      const auto before = states_of(*pool);
      std::shared_ptr<Swap> swap;
      const bool thrown = fail([&] { swap = out ? pool->begin_swap_out(2) : pool->begin_swap_in(cold, into); });
      if (thrown) CHECK(states_of(*pool) == before);
      if (swap != nullptr) CHECK(eventually([&] { return swap->done(); }));
    });
    CHECK(threw > 0);
  }
}

TEST_CASE("a swap in whose audit finds a fault gives back no block that the index has") {
  for (const bool named : {true, false}) {
    PoolOptions options = small_options(8, 8);
    options.audit = true;
    const auto pool = std::make_shared<Pool>(options);
    const Addresses broken = alloc(*pool, 1);
    insert(pool, prompt(2, 1), broken);
    const Addresses blocks = alloc(*pool, 3, Medium::kDram);
    insert(pool, prompt(1, 3), blocks);
    const Addresses into = named ? alloc(*pool, 3) : Addresses();
    pool->for_peers().quarantine(broken.data(), 1);  // the fault: it is the index's
    Addresses out(3);
    CHECK(code_of([&] { pool->swap_in(blocks, into, out.data()); }) == ErrorCode::kAudit);
    CHECK(count(*pool, Medium::kHbm, BlockState::kHistorical) == 3);
    CHECK(count(*pool, Medium::kHbm, BlockState::kActive) == 0);
    CHECK(count(*pool, Medium::kHbm, BlockState::kFree) == 4);
    CHECK(count(*pool, Medium::kDram, BlockState::kFree) == 8);
    CHECK(pool->stats().media[Medium::kHbm].evictable == 4);  // there are no pins
  }
}

TEST_CASE("blocks that a copy fills cannot be freed before it has ended") {
  HeldPool held(4, 4);
  const Found found = match(held.pool, held.store(1, 2, Medium::kDram));
  const Addresses into = alloc(*held.pool, 2);
  held.mover.hold(TierWay::kIn, true);
  const auto copy = held.pool->begin_copy(TierWay::kIn, found.addresses, into, {});
  REQUIRE(held.mover.begun(TierWay::kIn));
  CHECK(code_of([&] { held.pool->free(into.data(), into.size()); }) == ErrorCode::kState);
  held.mover.hold(TierWay::kIn, false);
  CHECK_FALSE(end_of(*copy));
  held.pool->free(into.data(), into.size());
  held.pool->audit();
}

TEST_CASE("a forked child does not touch a pool with swaps under way") {
  HeldPool held(8, 8);
  held.store(1, 2);
  held.mover.hold(TierWay::kOut, true);
  const auto swap = held.pool->begin_swap_out(2);
  REQUIRE(held.mover.begun(TierWay::kOut));
  const int status = test::run_in_child([&] {
    if (code_of([&] { held.pool->begin_swap_out(1); }) != ErrorCode::kFork) return 1;
    if (code_of([&] { held.pool->begin_swap_in({}, {}); }) != ErrorCode::kFork) return 2;
    held.pool->close();
    held.pool.reset();
    return 0;
  });
  CHECK(status == 0);
  held.mover.hold(TierWay::kOut, false);
  CHECK_FALSE(end_of(*swap));
}

}  // namespace
}  // namespace kvpool::testing
