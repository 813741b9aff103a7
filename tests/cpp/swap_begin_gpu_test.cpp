// Swaps that a thread of the pool carries out, on a GPU: what work they follow, and how they end when it stalls or
// fails.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gpu_swap_kit.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/swap_handle.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

TEST_CASE("on a GPU a background swap follows the work given before the call, and no later work") {
  for (const int version : {13000, 12040}) {  // with and without events of a whole device
    for (const bool named : {true, false}) {
      CAPTURE(version);
      CAPTURE(named);
      const FakeCuda cuda;
      cuda.set("version", version);
      {
        const auto pool = gpu_pool();
        const EngineStream engine(cuda);
        store_stamped(pool, 1, 2, Medium::kHbm, 5);
        const Addresses blocks = match(pool, prompt(1, 2)).addresses;
        engine.run([&] {
          dawdle();
          for (const Address block : blocks) stamp(*pool, block, 6);
        });
        const auto out = pool->begin_swap_out(2, named ? CallerStream(engine.handle()) : CallerStream());
        std::atomic<bool> let_go{false};
        engine.run([&] { eventually([&] { return let_go.load(); }); });
        CHECK_FALSE(end_of(*out));
        for (const Address address : out->addresses()) CHECK(has_stamp(*pool, address, 6));
        let_go = true;
        engine.wait();
        const auto in = pool->begin_swap_in(out->addresses(), {}, engine.handle());
        CHECK_FALSE(end_of(*in));
        for (const Address address : in->addresses()) CHECK(has_stamp(*pool, address, 6));
      }
      CHECK(cuda.left() == "");
    }
  }
}

TEST_CASE("on a GPU a background swap follows the work that fills blocks inserted after the call") {
  for (const int version : {13000, 12040}) {
    CAPTURE(version);
    const FakeCuda cuda;
    cuda.set("version", version);
    const auto pool = gpu_pool();
    const EngineStream first(cuda);
    const EngineStream engine(cuda);
    Gate gate(first);
    const auto out = pool->begin_swap_out(2, first.handle());  // chooses its blocks when the gate opens
    const Addresses blocks = alloc(*pool, 2);
    engine.run([&] {
      dawdle();
      for (const Address block : blocks) stamp(*pool, block, 7);
    });
    insert(pool, prompt(1, 2), blocks);
    gate.open();
    CHECK_FALSE(end_of(*out));
    REQUIRE(out->addresses().size() == 2);
    for (const Address address : out->addresses()) CHECK(has_stamp(*pool, address, 7));
    engine.wait();
  }
}

TEST_CASE("on a GPU a background swap in follows the work that reads blocks freed after the call") {
  for (const bool make_room : {false, true}) {
    CAPTURE(make_room);
    const FakeCuda cuda;
    const auto pool = gpu_pool();
    const EngineStream first(cuda);
    const EngineStream engine(cuda);
    store_stamped(pool, 1, 2, Medium::kDram, 6);
    const Addresses mine = alloc(*pool, 8);  // all of HBM
    for (const Address block : mine) stamp(*pool, block, 5);
    Gate gate(first);
    const auto in = pool->begin_swap_in(match(pool, prompt(1, 2)).addresses, {}, first.handle());
    std::atomic<int> intact{0};
    engine.run([&] {
      dawdle();
      for (const Address block : mine) intact += has_stamp(*pool, block, 5) ? 1 : 0;
    });
    if (make_room) {
      insert(pool, prompt(2, 8), mine);
    } else {
      pool->free(mine.data(), mine.size());
    }
    gate.open();
    CHECK_FALSE(end_of(*in));
    engine.wait();
    CHECK(intact == 8);
    for (const Address address : in->addresses()) CHECK(has_stamp(*pool, address, 6));
  }
}

TEST_CASE("a background swap that would break a capture fails, and the pool is unchanged") {
  const FakeCuda cuda;
  const auto pool = gpu_pool();
  const EngineStream first(cuda);
  Gate gate(first);
  const auto out = pool->begin_swap_out(2, first.handle());
  store_stamped(pool, 1, 2, Medium::kHbm, 7);
  const auto before = states_of(*pool);
  cuda.set("capturing", 1);
  gate.open();
  CHECK(end_of(*out) == ErrorCode::kState);
  cuda.set("capturing", 0);
  CHECK(states_of(*pool) == before);
  CHECK(pool->swap_out(2).size() == 2);
}

TEST_CASE("a swap whose stream stalls can be cancelled, and ends when its pool is closed, before that work does") {
  for (const bool by_close : {true, false}) {
    for (const bool named : {true, false}) {
      const FakeCuda cuda;
      const auto pool = gpu_pool();
      const EngineStream engine(cuda);
      store_stamped(pool, 1, 2, Medium::kHbm, 5);
      store_stamped(pool, 2, 2, Medium::kDram, 6);
      std::atomic<bool> let_go{false};
      std::atomic<bool> gave_up{false};
      engine.run([&] { gave_up = !eventually([&] { return let_go.load(); }); });
      const CallerStream after = named ? CallerStream(engine.handle()) : CallerStream();
      const auto before = states_of(*pool);
      const auto out = pool->begin_swap_out(2, after);
      const auto in = pool->begin_swap_in(match(pool, prompt(2, 2)).addresses, {}, after);
      // Closing also gives memory back to the driver, which waits for that work: so it runs beside this.
      std::jthread closing;
      if (by_close) {
        closing = std::jthread([&] { pool->close(); });
      } else {
        CHECK(out->cancel());
        CHECK(in->cancel());
      }
      const ErrorCode wanted = by_close ? ErrorCode::kClosed : ErrorCode::kCancelled;
      CHECK(end_of(*out) == wanted);
      CHECK(end_of(*in) == wanted);
      if (!by_close) CHECK(states_of(*pool) == before);
      let_go = true;
      engine.wait();
      if (by_close) closing.join();
      CHECK_FALSE(gave_up);
    }
  }
}

TEST_CASE("if any driver call fails in a background swap, the pool is unchanged") {
  for (const bool out : {true, false}) {
    int failures = 0;
    for (int n = 1;; ++n) {
      CAPTURE(n);
      const FakeCuda cuda;
      cuda.set("delay_us", 20);
      {
        const auto pool = gpu_pool();
        const EngineStream engine(cuda);
        store_stamped(pool, 1, 3, out ? Medium::kHbm : Medium::kDram, 7);
        const Addresses cold = match(pool, prompt(1, 3)).addresses;
        const auto before = states_of(*pool);
        cuda.fail_nth(n, 304);
        const auto code = code_of([&] {
          const auto swap =
              out ? pool->begin_swap_out(3, engine.handle()) : pool->begin_swap_in(cold, {}, engine.handle());
          REQUIRE(eventually([&] { return swap->done(); }));
          cuda.fail_nth(0, 0);
          swap->rethrow_if_failed();
        });
        cuda.fail_nth(0, 0);
        if (code) {
          ++failures;
          CHECK(*code == ErrorCode::kUnsupported);
          CHECK(states_of(*pool) == before);
        }
        const Found found = match(pool, prompt(1, 3));
        CHECK(found.addresses.size() == 3);
        for (const Address address : found.addresses) CHECK(has_stamp(*pool, address, 7));
      }
      const bool reached = cuda.failed();
      CHECK((cuda.left() == "" || cuda.left() == "events=1"));  // destroying it was the call that failed
      if (!reached) break;
    }
    CHECK(failures >= 5);
  }
}

TEST_CASE("losing the GPU ends a background swap and the pool") {
  const FakeCuda cuda;
  const auto pool = gpu_pool();
  const EngineStream engine(cuda);
  store_stamped(pool, 1, 2, Medium::kHbm, 5);
  std::atomic<bool> let_go{false};
  engine.run([&] { eventually([&] { return let_go.load(); }); });
  const auto swap = pool->begin_swap_out(2, engine.handle());
  cuda.lose(0, 719);
  let_go = true;
  CHECK(end_of(*swap) == ErrorCode::kDeviceLost);
  CHECK(code_of([&] { pool->begin_swap_out(1); }) == ErrorCode::kDeviceLost);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
