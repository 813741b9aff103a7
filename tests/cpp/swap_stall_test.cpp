// Swaps that a thread of the pool carries out, when blocks changed hands after the call and some work of the GPU, of
// whatever stream, does not end: who waits with them, and that they can be cancelled.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "gpu_swap_kit.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/swap_handle.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

// A block comes into the index, and is freed: both directions' reuse_counts moves, and the pool is as before.
void turn_over(const std::shared_ptr<Pool>& pool) {
  const Tokens tokens = prompt(99, 1);
  insert(pool, tokens, alloc(*pool, 1));
  REQUIRE(pool->erase("", tokens.data(), tokens.size(), false) == 1);
}

// Returns when some thread waits for the whole device for the n-th time.
bool waits_for_device(const FakeCuda& cuda, std::size_t n) {
  return eventually([&] { return cuda.count("cuCtxRecordEvent") + cuda.count("cuCtxSynchronize") >= n; });
}

// Whether the call returns while the work stalls; when not, lets that work go on, for the call to return.
template <class Call>
bool ends_beside(Gate& stall, Call&& call) {
  std::atomic<bool> over{false};
  std::thread thread([&] {
    call();
    over = true;
  });
  const bool ended = eventually([&] { return over.load(); });
  if (!ended) stall.open();
  thread.join();
  return ended;
}

// Whether the swap ends while the pool is closed and the work stalls. The pool's memory goes later: that waits for what
// the GPU is at.
bool closed_beside(Gate& stall, Pool& pool, Swap& swap) {
  std::thread thread([&] { pool.close(); });
  const bool ended = eventually([&] { return swap.done(); });
  stall.open();
  thread.join();
  return ended;
}

std::uint32_t reserved(Pool& pool) {
  return count(pool, Medium::kHbm, BlockState::kReserved) + count(pool, Medium::kDram, BlockState::kReserved);
}

// A swap of two pages that was asked for behind one stream; then blocks turned over, and work of another one stalls.
struct StalledSwap {
  explicit StalledSwap(bool out) : pool(gpu_pool()) {
    store_stamped(pool, 1, 2, Medium::kHbm, 5);
    store_stamped(pool, 2, 2, Medium::kDram, 6);
    store_stamped(pool, 3, 1, Medium::kDram, 7);
    before = states_of(*pool);
    Gate gate(first);
    swap = out ? pool->begin_swap_out(2, first.handle())
               : pool->begin_swap_in(match(pool, prompt(2, 2)).addresses, {}, first.handle());
    turn_over(pool);
    stall.emplace(other);
    gate.open();
  }

  FakeCuda cuda;
  std::shared_ptr<Pool> pool;
  EngineStream first{cuda};
  EngineStream other{cuda};
  std::vector<std::uint32_t> before;
  std::shared_ptr<Swap> swap;
  std::optional<Gate> stall;
};

TEST_CASE("a swap that waits for later work can be cancelled, and ends with its pool, before that work does") {
  for (const bool out : {true, false}) {
    for (const bool by_close : {true, false}) {
      CAPTURE(out);
      CAPTURE(by_close);
      StalledSwap stalled(out);
      REQUIRE(waits_for_device(stalled.cuda, 1));
      if (by_close) {
        CHECK(closed_beside(*stalled.stall, *stalled.pool, *stalled.swap));
      } else {
        CHECK(stalled.swap->cancel());
        CHECK(ends_beside(*stalled.stall, [&] { CHECK(eventually([&] { return stalled.swap->done(); })); }));
      }
      CHECK(end_of(*stalled.swap) == (by_close ? ErrorCode::kClosed : ErrorCode::kCancelled));
      if (!by_close) CHECK(states_of(*stalled.pool) == stalled.before);
    }
  }
}

TEST_CASE("a swap that waits for later work does not stop other calls from evicting and swapping in") {
  for (const bool out : {true, false}) {
    CAPTURE(out);
    StalledSwap stalled(out);
    Pool& pool = *stalled.pool;
    REQUIRE(waits_for_device(stalled.cuda, 1));
    const EngineStream third(stalled.cuda);
    Addresses room(out ? 7 : 5);  // one more than are free
    CHECK(ends_beside(*stalled.stall,
                      [&] { pool.alloc_evicting(room.size(), Medium::kHbm, room.data(), third.handle()); }));
    CHECK(pool.stats().counters.swapped_out_blocks == 1);
    pool.free(room.data(), room.size());
    const Addresses warm = match(stalled.pool, prompt(3, 1)).addresses;
    CHECK(ends_beside(*stalled.stall,
                      [&] { CHECK(swap_in(stalled.pool, warm, {}, third.handle()).addresses[0] != warm[0]); }));
    CHECK_FALSE(stalled.swap->done());
    stalled.stall->open();
    CHECK_FALSE(end_of(*stalled.swap));
    CHECK(all_in(stalled.swap->addresses(), out ? Medium::kDram : Medium::kHbm));
    CHECK(reserved(pool) == 0);
  }
}

TEST_CASE("a swap out with blocks that turn over repeatedly keeps its choice, and can be cancelled") {
  for (const bool by_close : {true, false}) {
    CAPTURE(by_close);
    const FakeCuda cuda;
    const auto pool = gpu_pool();
    store_stamped(pool, 1, 2, Medium::kHbm, 5);
    const auto before = states_of(*pool);
    std::vector<std::unique_ptr<EngineStream>> streams;
    std::vector<std::unique_ptr<Gate>> gates;  // gone before their streams
    const auto stall = [&] {
      streams.push_back(std::make_unique<EngineStream>(cuda));
      gates.push_back(std::make_unique<Gate>(*streams.back()));
    };
    stall();
    const auto swap = pool->begin_swap_out(2, streams[0]->handle());
    std::size_t looks = 0;
    while (reserved(*pool) == 0) {
      REQUIRE(looks < 10);
      turn_over(pool);
      stall();
      gates[looks]->open();
      REQUIRE(waits_for_device(cuda, ++looks));
    }
    CHECK(reserved(*pool) == 2);
    if (by_close) {
      CHECK(closed_beside(*gates.back(), *pool, *swap));
    } else {
      CHECK(swap->cancel());
      CHECK(ends_beside(*gates.back(), [&] { CHECK(eventually([&] { return swap->done(); })); }));
    }
    CHECK(end_of(*swap) == (by_close ? ErrorCode::kClosed : ErrorCode::kCancelled));
    if (!by_close) CHECK(states_of(*pool) == before);
  }
}

TEST_CASE("a swap in that is cancelled before room is made for it leaves the pool unchanged") {
  const FakeCuda cuda;
  const auto pool = gpu_pool(2, 4);
  const EngineStream first(cuda);
  const EngineStream other(cuda);
  store_stamped(pool, 1, 1, Medium::kHbm, 5);
  store_stamped(pool, 2, 2, Medium::kDram, 6);
  const auto before = states_of(*pool);
  Gate gate(first);
  const auto swap = pool->begin_swap_in(match(pool, prompt(2, 2)).addresses, {}, first.handle());
  turn_over(pool);
  Gate stall(other);
  gate.open();
  REQUIRE(waits_for_device(cuda, 1));
  CHECK(swap->cancel());
  CHECK(ends_beside(stall, [&] { CHECK(eventually([&] { return swap->done(); })); }));
  CHECK(end_of(*swap) == ErrorCode::kCancelled);
  CHECK(states_of(*pool) == before);
  CHECK(pool->stats().counters.swapped_out_blocks == 0);
}

TEST_CASE("a swap in that evicted blocks follows the work that reads them") {
  const FakeCuda cuda;
  const auto pool = gpu_pool(2, 4);
  const EngineStream first(cuda);
  const EngineStream reader(cuda);
  store_stamped(pool, 1, 2, Medium::kHbm, 5);
  store_stamped(pool, 2, 2, Medium::kDram, 6);
  Gate gate(first);
  const auto swap = pool->begin_swap_in(match(pool, prompt(2, 2)).addresses, {}, first.handle());
  const Addresses read = match(pool, prompt(1, 2)).addresses;
  std::atomic<int> intact{0};
  reader.run([&] {
    dawdle();
    for (const Address address : read) intact += has_stamp(*pool, address, 5) ? 1 : 0;
  });
  gate.open();
  CHECK_FALSE(end_of(*swap));
  reader.wait();
  CHECK(intact == 2);
  for (const Address address : swap->addresses()) CHECK(has_stamp(*pool, address, 6));
}

TEST_CASE("a swap that has begun cannot be cancelled, and waits for nothing more when its pool is closed") {
  const FakeCuda cuda;
  const auto pool = gpu_pool();
  const EngineStream engine(cuda);
  Gate stall(engine);
  Swap swap(*pool, nullptr, {});
  swap.start();
  swap.begin();
  CHECK_NOTHROW(swap.begin());
  CHECK_FALSE(swap.cancel());
  swap.close();
  const auto order = DeviceOrder::after_now(pool->arena(Medium::kHbm)->context(), std::nullopt);
  CHECK(ends_beside(stall, [&] { CHECK(code_of([&] { swap.follow(*order, {}); }) == ErrorCode::kClosed); }));
  CHECK_NOTHROW(swap.begin());
}

// --- a refusal of the GPU costs no cached block

// DRAM is full, and there is room for two of HBM's four blocks.
struct FullPool {
  FullPool() : pool(gpu_pool(4, 4)) {
    store_stamped(pool, 1, 2, Medium::kHbm, 5);
    store_stamped(pool, 2, 4, Medium::kDram, 6);
    cold = match(pool, prompt(2, 4)).addresses;
    before = states_of(*pool);
  }
  // Each verb that gives something up for a copy.
  void check_refused(const CallerStream& stream, ErrorCode code) {
    Addresses out(4);
    CHECK(code_of([&] { pool->swap_out(2, stream); }) == code);
    CHECK(code_of([&] { pool->alloc_evicting(3, Medium::kHbm, out.data(), stream); }) == code);
    CHECK(code_of([&] { pool->swap_in(cold, {}, out.data(), stream); }) == code);
    CHECK(code_of([&] { pool->begin_swap_out(2, stream); }) == code);
    CHECK(code_of([&] { pool->begin_swap_in(cold, {}, stream); }) == code);
    check_kept();
  }
  void check_kept() const {
    CHECK(states_of(*pool) == before);
    CHECK(pool->stats().counters.evicted_blocks == 0);
    CHECK(match(pool, prompt(1, 2)).addresses.size() == 2);
    CHECK(match(pool, prompt(2, 4)).addresses == cold);
  }

  FakeCuda cuda;
  std::shared_ptr<Pool> pool;
  Addresses cold;
  std::vector<std::uint32_t> before;
};

TEST_CASE("no cached block is lost when a stream is refused") {
  FullPool full;
  const EngineStream engine(full.cuda);
  const EngineStream elsewhere(full.cuda, 1);
  engine.begin_capture();
  full.check_refused(engine.handle(), ErrorCode::kState);
  engine.end_capture();
  full.check_refused(elsewhere.handle(), ErrorCode::kArgument);
  CHECK(full.pool->swap_out(2, engine.handle()).size() == 2);
}

TEST_CASE("no cached block is lost when a capture refuses a copy after the whole device") {
  FullPool full;
  full.cuda.set("capturing", 1);
  full.check_refused({}, ErrorCode::kState);
  full.cuda.set("capturing", 0);
  CHECK(full.pool->swap_out(2).size() == 2);
}

TEST_CASE("no cached block is lost when a capture refuses a background swap after blocks were turned over") {
  for (const bool out : {true, false}) {
    CAPTURE(out);
    FullPool full;
    const EngineStream first(full.cuda);
    Gate gate(first);
    const auto swap =
        out ? full.pool->begin_swap_out(2, first.handle()) : full.pool->begin_swap_in(full.cold, {}, first.handle());
    turn_over(full.pool);
    full.cuda.set("capturing", 1);
    gate.open();
    CHECK(end_of(*swap) == ErrorCode::kState);
    full.cuda.set("capturing", 0);
    full.check_kept();
  }
}

TEST_CASE("losing the GPU when a stream is looked at fails the pool") {
  FullPool full;
  const EngineStream engine(full.cuda);
  full.cuda.lose(0, 719);
  CHECK(code_of([&] { full.pool->swap_out(2, engine.handle()); }) == ErrorCode::kDeviceLost);
  CHECK(code_of([&] { full.pool->try_alloc(0, Medium::kDram, nullptr); }) == ErrorCode::kDeviceLost);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
