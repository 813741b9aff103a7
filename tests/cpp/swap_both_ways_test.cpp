// Swaps out and in at the same time, and what else is done to the pool while bytes are on their way to HBM.
#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "device_kit.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/swap_handle.h"
#include "swap_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

TEST_CASE("a swap out and a swap in copy at the same time, whichever began first") {
  for (const TierWay first : {TierWay::kOut, TierWay::kIn}) {
    CAPTURE(static_cast<int>(first));
    HeldPool held(8, 8);
    held.store(1, 3);
    const Tokens cold = held.store(2, 2, Medium::kDram);
    const TierWay second = first == TierWay::kOut ? TierWay::kIn : TierWay::kOut;
    held.mover.hold(TierWay::kOut, true);
    held.mover.hold(TierWay::kIn, true);
    Brought brought;
    const auto swap = [&](TierWay way) {
      if (way == TierWay::kOut) {
        CHECK(held.pool->swap_out(3).size() == 3);
      } else {
        brought = swap_in(held.pool, match(held.pool, cold).addresses);
      }
    };
    std::thread one([&] { swap(first); });
    CHECK(held.mover.begun(first));
    std::thread other([&] { swap(second); });
    CHECK(held.mover.begun(second));  // both are under way now
    CHECK(held.mover.under_way(first) == 1);
    // The one that began later ends first.
    held.mover.hold(second, false);
    other.join();
    CHECK(held.mover.under_way(first) == 1);
    held.mover.hold(first, false);
    one.join();
    CHECK(all_in(brought.addresses, Medium::kHbm));
    CHECK(held.count(Medium::kDram, BlockState::kHistorical) == 3);
    CHECK(held.count(Medium::kHbm, BlockState::kHistorical) == 2);
    held.pool->audit();
  }
}

TEST_CASE("blocks that a swap in copies are not evicted, deleted or moved, and can be matched and cut") {
  HeldPool held(8, 8);
  const Tokens cold = held.store(1, 4, Medium::kDram);
  held.mover.hold(TierWay::kIn, true);
  Brought brought;
  std::thread in([&] { brought = swap_in(held.pool, match(held.pool, cold).addresses); });
  REQUIRE(held.mover.begun(TierWay::kIn));
  CHECK(held.pool->evict(8, kMixed) == 0);
  CHECK(code_of([&] { held.pool->erase("", cold.data(), cold.size(), true); }) == ErrorCode::kState);
  CHECK(held.pool->swap_out(8).empty());
  Found half = match(held.pool, Tokens(cold.begin(), cold.begin() + 2 * kPage));  // cuts the node
  CHECK(all_in(half.addresses, Medium::kDram));
  Tokens branch(cold.begin(), cold.begin() + kPage);
  const Tokens tail = prompt(7, 1);
  branch.insert(branch.end(), tail.begin(), tail.end());
  Held more = insert(held.pool, branch, {half.addresses[0], alloc(*held.pool, 1)[0]});  // and again
  held.mover.hold(TierWay::kIn, false);
  in.join();
  CHECK(all_in(brought.addresses, Medium::kHbm));
  CHECK(match(held.pool, cold).addresses == brought.addresses);
  // A request that matched meanwhile keeps reading the old blocks: that is limbo.
  CHECK(held.count(Medium::kDram, BlockState::kHistorical) == 2);
  half.pins.release();
  more.pins.release();
  CHECK(held.count(Medium::kDram, BlockState::kFree) == 8);
  held.pool->audit();
}

TEST_CASE("swaps in that overlap use the pages that an earlier one has brought") {
  for (const bool whole : {true, false}) {
    HeldPool held(8, 8);
    const Tokens cold = held.store(1, 6, Medium::kDram);
    Found found = match(held.pool, cold);
    const Addresses early(found.addresses.begin(), found.addresses.begin() + 4);
    const Addresses late(found.addresses.begin() + (whole ? 0 : 2), found.addresses.begin() + (whole ? 4 : 6));
    found.pins.release();
    held.mover.hold(TierWay::kIn, true);
    Brought one;
    Brought other;
    std::thread first([&] { one = swap_in(held.pool, early); });
    REQUIRE(held.mover.begun(TierWay::kIn));
    const auto second = held.pool->begin_swap_in(late, {});  // has looked at the pages where they are now
    held.mover.hold(TierWay::kIn, false);
    first.join();
    REQUIRE(eventually([&] { return second->done(); }));
    second->rethrow_if_failed();
    Addresses both = one.addresses;
    both.insert(both.end(), second->addresses().end() - (whole ? 0 : 2), second->addresses().end());
    CHECK(second->addresses().front() == one.addresses[whole ? 0 : 2]);
    const Tokens part(cold.begin(), cold.begin() + static_cast<std::ptrdiff_t>(both.size() * kPage));
    CHECK(match(held.pool, part).addresses == both);
    CHECK(held.count(Medium::kDram, BlockState::kFree) == (whole ? 6 : 8));
    CHECK(held.pool->stats().counters.swapped_in_blocks == (whole ? 4 : 6));
  }
}

TEST_CASE("a copy that the ranks cannot do now fails only its swap: all is unchanged, and the next one works") {
  HeldPool held(8, 8);
  const Tokens hot = held.store(1, 3);
  const Tokens cold = held.store(2, 2, Medium::kDram);
  const Addresses before = match(held.pool, cold).addresses;
  held.mover.fail(ErrorCode::kState);
  CHECK(code_of([&] { held.pool->swap_out(3); }) == ErrorCode::kState);
  CHECK(code_of([&] { swap_in(held.pool, before); }) == ErrorCode::kState);
  const auto later = held.pool->begin_swap_in(before, {});
  REQUIRE(eventually([&] { return later->done(); }));
  CHECK(code_of([&] { later->rethrow_if_failed(); }) == ErrorCode::kState);
  CHECK(match(held.pool, cold).addresses == before);
  CHECK(all_in(match(held.pool, hot).addresses, Medium::kHbm));
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) CHECK(held.count(medium, BlockState::kReserved) == 0);
  held.pool->audit();
  held.mover.fail(std::nullopt);
  CHECK(held.pool->swap_out(3).size() == 3);
  CHECK(all_in(swap_in(held.pool, before).addresses, Medium::kHbm));
}

TEST_CASE("an allocation in DRAM waits for the blocks that a swap in is about to leave") {
  HeldPool held(4, 4);
  const Addresses cold = match(held.pool, held.store(1, 4, Medium::kDram)).addresses;  // no one reads them on
  held.mover.hold(TierWay::kIn, true);
  Brought brought;
  std::thread in([&] { brought = swap_in(held.pool, cold); });
  REQUIRE(held.mover.begun(TierWay::kIn));
  Addresses hbm(1);
  CHECK(code_of([&] { held.pool->alloc_evicting(1, Medium::kHbm, hbm.data()); }) == ErrorCode::kOutOfBlocks);
  std::atomic<bool> ended{false};
  Addresses dram(3);
  std::thread alloc([&] {
    CHECK_FALSE(code_of([&] { held.pool->alloc_evicting(3, Medium::kDram, dram.data()); }));
    ended = true;
  });
  CHECK_FALSE(ended);
  held.mover.hold(TierWay::kIn, false);
  in.join();
  alloc.join();
  CHECK(all_in(dram, Medium::kDram));
}

TEST_CASE("an allocation in DRAM for which swaps in cannot make enough room does not wait for the queued ones") {
  // Between two copies there is a moment in which none is under way. A call that looks just then does not wait,
  // whatever it would do otherwise: hence several rounds.
  for (int round = 0; round < 12; ++round) {
    CAPTURE(round);
    HeldPool held(4, 4);
    held.mover.hold(TierWay::kIn, true);
    std::vector<std::shared_ptr<Swap>> swaps;
    for (const Token id : {1, 2}) {
      const Addresses cold = match(held.pool, held.store(id, 1, Medium::kDram)).addresses;
      swaps.push_back(held.pool->begin_swap_in(cold, {}));
    }
    REQUIRE(held.mover.begun(TierWay::kIn));
    std::atomic<pid_t> looks{0};
    std::atomic<bool> ended{false};
    std::optional<ErrorCode> code;
    std::thread alloc([&] {
      Addresses dram(5);  // more than there are
      looks = gettid();
      code = code_of([&] { held.pool->alloc_evicting(dram.size(), Medium::kDram, dram.data()); });
      ended = true;
    });
    CHECK(eventually([&] { return looks != 0; }));
    CHECK(falls_asleep(looks));  // it waits for the first copy: only that frees what it needs
    held.mover.let_go(TierWay::kIn, 1);
    CHECK(held.mover.begun(TierWay::kIn, 2));
    CHECK(eventually([&] { return ended.load(); }, kLong / 3));
    CHECK(held.mover.under_way(TierWay::kIn) == 1);
    const bool waited_on = !ended;
    held.mover.hold(TierWay::kIn, false);
    alloc.join();
    CHECK(code == ErrorCode::kOutOfBlocks);
    for (const auto& swap : swaps) CHECK_FALSE(end_of(*swap));
    REQUIRE_FALSE(waited_on);  // or each round takes its time
  }
}

TEST_CASE("a swap in waits for a swap out only if it has to make room") {
  HeldPool held(4, 8);
  held.store(1, 3);
  const Tokens small = held.store(2, 1, Medium::kDram);
  const Tokens large = held.store(3, 3, Medium::kDram);
  held.mover.hold(TierWay::kOut, true);
  std::thread out([&] { CHECK(held.pool->swap_out(2).size() == 2); });
  REQUIRE(held.mover.begun(TierWay::kOut));
  Brought one = swap_in(held.pool, match(held.pool, small).addresses);
  CHECK(all_in(one.addresses, Medium::kHbm));
  const auto second = held.pool->begin_swap_in(match(held.pool, large).addresses, {});
  CHECK_FALSE(second->done());
  held.mover.hold(TierWay::kOut, false);
  out.join();
  REQUIRE(eventually([&] { return second->done(); }));
  second->rethrow_if_failed();
  CHECK(all_in(second->addresses(), Medium::kHbm));
  held.pool->audit();
}

TEST_CASE("a pool that joins a cluster while blocks are copied gives them addresses of that instance") {
  HeldPool held(8, 8);
  held.store(1, 2);
  const Tokens warm = prompt(1, 2);
  const Tokens cold = held.store(2, 2, Medium::kDram);
  for (const TierWay way : {TierWay::kOut, TierWay::kIn}) held.mover.hold(way, true);
  const auto in = held.pool->begin_swap_in(match(held.pool, cold).addresses, {});
  const auto out = held.pool->begin_swap_out(2);
  REQUIRE(held.mover.begun(TierWay::kIn));
  REQUIRE(held.mover.begun(TierWay::kOut));
  held.pool->set_instance(77);
  for (const TierWay way : {TierWay::kOut, TierWay::kIn}) held.mover.hold(way, false);
  REQUIRE(eventually([&] { return in->done() && out->done(); }));
  for (const Tokens& tokens : {warm, cold}) {
    const Found found = match(held.pool, tokens);
    CHECK(found.addresses.size() == 2);
    for (const Address address : found.addresses) CHECK(instance_of(address) == 77);
  }
  held.pool->audit();
}

#ifdef KVPOOL_FAKE_CUDA

TEST_CASE("on a GPU a swap ends while one in the other direction is held up by its stream") {
  for (const TierWay stalled : {TierWay::kOut, TierWay::kIn}) {
    CAPTURE(static_cast<int>(stalled));
    const FakeCuda cuda;
    PoolOptions options = small_options(8, 8);
    options.device = 0;
    options.pin_dram = true;
    options.audit = true;
    const auto pool = std::make_shared<Pool>(options);
    const EngineStream engine(cuda);
    const EngineStream other(cuda);
    const auto store = [&](Token id, Medium medium) {
      const Addresses blocks = alloc(*pool, 2, medium);
      for (const Address block : blocks) stamp(*pool, block, id);
      insert(pool, prompt(id, 2), blocks);
    };
    store(1, Medium::kHbm);
    store(2, Medium::kDram);
    std::atomic<bool> let_go{false};
    engine.run([&] { eventually([&] { return let_go.load(); }); });
    const auto swap = [&](TierWay way, CuStream stream) {
      if (way == TierWay::kOut) {
        CHECK(pool->swap_out(2, stream).size() == 2);
      } else {
        const Brought brought = swap_in(pool, match(pool, prompt(2, 2)).addresses, {}, stream);
        for (const Address address : brought.addresses) CHECK(has_stamp(*pool, address, 2));
      }
    };
    std::atomic<bool> ended{false};
    std::thread held([&] {
      swap(stalled, engine.handle());
      ended = true;
    });
    const Medium target = stalled == TierWay::kOut ? Medium::kDram : Medium::kHbm;
    CHECK(eventually([&] { return count(*pool, target, BlockState::kReserved) == 2; }));
    swap(stalled == TierWay::kOut ? TierWay::kIn : TierWay::kOut, other.handle());
    CHECK_FALSE(ended);
    let_go = true;
    held.join();
    for (const Token id : {1, 2}) {
      const Found found = match(pool, prompt(id, 2));
      CHECK(found.addresses.size() == 2);
      CHECK(all_in(found.addresses, id == 1 ? Medium::kDram : Medium::kHbm));
      for (const Address address : found.addresses) CHECK(has_stamp(*pool, address, static_cast<std::uint64_t>(id)));
    }
    CHECK(cuda.count("pageable") == 0);
  }
}

#endif  // KVPOOL_FAKE_CUDA

}  // namespace
}  // namespace kvpool::testing
