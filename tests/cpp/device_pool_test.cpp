// The pool with HBM on a (fake) GPU.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "child_process.h"
#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/error.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/pool/pool.h"
#include "kvpool/ranks/instance_ranks.h"
#include "pool_fixture.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

PoolOptions device_options(std::uint32_t hbm_blocks, std::uint32_t dram_blocks) {
  PoolOptions options = small_options(hbm_blocks, dram_blocks);
  options.device = 0;
  options.pin_dram = true;
  options.audit = true;
  return options;
}

void fill(const FakeCuda& cuda, Pool& pool, Address address, std::uint8_t value) {
  fill_block(cuda, *pool.arena(medium_of(address)), block_of(address), value);
}

bool is_filled(const FakeCuda& cuda, Pool& pool, Address address, std::uint8_t value) {
  return block_is(cuda, *pool.arena(medium_of(address)), block_of(address), value);
}

// A cached prompt of so many pages in HBM: page i is filled with value + i.
Tokens store(const FakeCuda& cuda, const std::shared_ptr<Pool>& pool, Token id, std::size_t pages, std::uint8_t value) {
  const Addresses blocks = alloc(*pool, pages);
  for (std::size_t i = 0; i < pages; ++i) fill(cuda, *pool, blocks[i], static_cast<std::uint8_t>(value + i));
  const Tokens tokens = prompt(id, pages);
  const Held held = insert(pool, tokens, blocks);
  return tokens;
}

bool is_cached(const FakeCuda& cuda, const std::shared_ptr<Pool>& pool, const Tokens& tokens, std::uint8_t value) {
  const Found found = match(pool, tokens);
  if (found.addresses.size() * kPage != tokens.size()) return false;
  for (std::size_t i = 0; i < found.addresses.size(); ++i) {
    if (!is_filled(cuda, *pool, found.addresses[i], static_cast<std::uint8_t>(value + i))) return false;
  }
  return true;
}

// Everything of the state that a call that failed must have left alone.
std::vector<std::uint64_t> state_of(Pool& pool) {
  const PoolStats stats = pool.audit();
  std::vector<std::uint64_t> numbers{stats.index_blocks, stats.counters.allocated_blocks - stats.counters.freed_blocks,
                                     stats.counters.swapped_in_blocks, stats.counters.swapped_out_blocks,
                                     stats.counters.evicted_blocks};
  for (const MediumCounts& counts : stats.media) {
    numbers.insert(numbers.end(), counts.by_state.begin(), counts.by_state.end());
    numbers.push_back(counts.evictable);
  }
  return numbers;
}

TEST_CASE("a pool on a GPU swaps out and in, and reports the memory that it has taken") {
  const FakeCuda cuda;
  {
    const auto pool = std::make_shared<Pool>(device_options(8, 8));
    CHECK(pool->on_device());
    CHECK(pool->stats().device_bytes == std::size_t{2} << 20);
    CHECK(cuda.count("bytes") == pool->stats().device_bytes);
    CHECK(pool->arena(Medium::kDram)->pinned());
    const Tokens tokens = store(cuda, pool, 1, 4, 10);
    CHECK(pool->swap_out(4).size() == 4);
    CHECK(is_cached(cuda, pool, tokens, 10));
    const Found found = match(pool, tokens);
    Addresses arrived(4);
    const Pins pins(pool, pool->swap_in(found.addresses, {}, arrived.data()));
    for (const Address address : arrived) CHECK(medium_of(address) == Medium::kHbm);
    CHECK(is_cached(cuda, pool, tokens, 10));
    CHECK(cuda.count("pageable") == 0);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("an allocation evicts on a GPU as it does elsewhere") {
  const FakeCuda cuda;
  const auto pool = std::make_shared<Pool>(device_options(6, 8));
  const Tokens tokens = store(cuda, pool, 1, 6, 30);
  const Addresses blocks = alloc(*pool, 5);
  for (const Address address : blocks) fill(cuda, *pool, address, 99);
  CHECK(is_cached(cuda, pool, tokens, 30));
  CHECK(pool->stats().counters.swapped_out_blocks == 5);
}

TEST_CASE("swap waits for the writer on the caller's stream") {
  const FakeCuda cuda;
  const auto pool = std::make_shared<Pool>(device_options(4, 4));
  const EngineStream engine(cuda);
  const Tokens tokens = store(cuda, pool, 1, 2, 50);
  const Found before = match(pool, tokens);
  const Addresses written = before.addresses;
  engine.run([&] {
    dawdle();
    for (const Address address : written) fill(cuda, *pool, address, 7);
  });
  const_cast<Found&>(before).pins = Pins();
  CHECK(pool->swap_out(2, engine.handle()).size() == 2);
  const Found after = match(pool, tokens);
  for (const Address address : after.addresses) {
    CHECK(medium_of(address) == Medium::kDram);
    CHECK(is_filled(cuda, *pool, address, 7));
  }
}

TEST_CASE("a block that an engine freed while reading it is not overwritten by a swap in before it was read") {
  const FakeCuda cuda;
  const auto pool = std::make_shared<Pool>(device_options(2, 4));
  const EngineStream engine(cuda);
  const Tokens tokens = store(cuda, pool, 1, 2, 50);
  pool->swap_out(2);
  const Addresses blocks = alloc(*pool, 2);
  for (const Address address : blocks) fill(cuda, *pool, address, 8);
  std::atomic<bool> was_whole{true};
  engine.run([&] {
    dawdle();
    for (const Address address : blocks) was_whole = was_whole && is_filled(cuda, *pool, address, 8);
  });
  pool->free(blocks.data(), blocks.size());
  const Found found = match(pool, tokens);
  Addresses arrived(2);
  const Pins pins(pool, pool->swap_in(found.addresses, {}, arrived.data(), engine.handle()));
  CHECK(was_whole);
  CHECK(is_cached(cuda, pool, tokens, 50));
}

TEST_CASE("if any driver call fails when a pool is made, nothing is left behind") {
  int failures = 0;
  for (int n = 1;; ++n) {
    CAPTURE(n);
    const FakeCuda cuda;
    cuda.fail_nth(n, 304);
    const auto code = code_of([&] {
      const Pool pool(device_options(4, 4));
      cuda.fail_nth(0, 0);
    });
    if (code) CHECK(*code == ErrorCode::kUnsupported);
    failures += code ? 1 : 0;
    CHECK(cuda.left() == "");
    if (!cuda.failed()) break;
  }
  CHECK(failures > 20);
}

TEST_CASE("if any driver call fails in a swap, the pool is unchanged and the next swap works") {
  for (const bool out : {true, false}) {
    int failures = 0;
    for (int n = 1;; ++n) {
      CAPTURE(n);
      const FakeCuda cuda;
      cuda.set("delay_us", 20);
      {
        const auto pool = std::make_shared<Pool>(device_options(4, 4));
        const EngineStream engine(cuda);
        const Tokens tokens = store(cuda, pool, 1, 3, 60);
        if (!out) pool->swap_out(3);
        const Found found = match(pool, out ? Tokens() : tokens);
        Addresses arrived(3);
        Pins pins;
        const auto swap = [&] {
          if (out) {
            pool->swap_out(3, engine.handle());
          } else {
            pins = Pins(pool, pool->swap_in(found.addresses, {}, arrived.data(), engine.handle()));
          }
        };
        const auto before = state_of(*pool);
        cuda.fail_nth(n, 304);
        const auto code = code_of(swap);
        cuda.fail_nth(0, 0);
        if (code) {
          ++failures;
          CHECK(*code == ErrorCode::kUnsupported);
          CHECK(state_of(*pool) == before);
          CHECK(is_cached(cuda, pool, tokens, 60));
          swap();
        }
        CHECK(is_cached(cuda, pool, tokens, 60));
        CHECK(pool->audit().media[Medium::kHbm].by_state[static_cast<std::size_t>(BlockState::kHistorical)] ==
              (out ? 0 : 3));
      }
      const bool reached = cuda.failed();
      CHECK(cuda.left() == "");
      if (!reached) break;
    }
    CHECK(failures >= 5);
  }
}

TEST_CASE("a stream of another GPU is refused and changes nothing, and a pool in ordinary memory takes no stream") {
  const FakeCuda cuda;
  const auto pool = std::make_shared<Pool>(device_options(4, 4));
  const EngineStream other_gpu(cuda, 2);
  const Tokens tokens = store(cuda, pool, 1, 3, 60);
  const auto before = state_of(*pool);
  CHECK(code_of([&] { pool->swap_out(3, other_gpu.handle()); }) == ErrorCode::kArgument);
  CHECK(state_of(*pool) == before);
  CHECK(is_cached(cuda, pool, tokens, 60));

  const auto ordinary = std::make_shared<Pool>(small_options(4, 4));
  Addresses out(1);
  CHECK(code_of([&] { ordinary->swap_out(1, CuStream{}); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { ordinary->swap_in({}, {}, out.data(), CuStream{}); }) == ErrorCode::kArgument);
}

TEST_CASE("every verb of a pool whose GPU is lost says so, and the pool can be closed") {
  for (const int code : {700, 709}) {
    const FakeCuda cuda;
    {
      const auto pool = std::make_shared<Pool>(device_options(4, 4));
      const Tokens tokens = store(cuda, pool, 1, 3, 60);
      cuda.lose(0, code);
      CHECK(code_of([&] { pool->swap_out(2); }) == ErrorCode::kDeviceLost);
      Addresses out(4);
      CHECK(code_of([&] { pool->try_alloc(1, Medium::kHbm, out.data()); }) == ErrorCode::kDeviceLost);
      CHECK(code_of([&] { pool->match("", tokens.data(), tokens.size(), out.data()); }) == ErrorCode::kDeviceLost);
      CHECK(code_of([&] { pool->swap_in({}, {}, out.data()); }) == ErrorCode::kDeviceLost);
      pool->close();
      CHECK(code_of([&] { pool->swap_out(2); }) == ErrorCode::kClosed);
    }
    CHECK(cuda.left() == "");
  }
}

TEST_CASE("an allocation that makes room on a lost GPU fails, and takes nothing") {
  const FakeCuda cuda;
  const auto pool = std::make_shared<Pool>(device_options(4, 4));
  store(cuda, pool, 1, 4, 60);
  cuda.lose(0, 719);
  Addresses out(2);
  CHECK(code_of([&] { pool->alloc_evicting(2, Medium::kHbm, out.data()); }) == ErrorCode::kDeviceLost);
}

TEST_CASE("blocks of a GPU are zeroed on request") {
  const FakeCuda cuda;
  PoolOptions options = device_options(4, 4);
  options.zero_on_alloc = true;
  const auto pool = std::make_shared<Pool>(options);
  for (const Address address : alloc(*pool, 8, kMixed)) CHECK(is_filled(cuda, *pool, address, 0));
}

TEST_CASE("blocks that could not be zeroed are not handed out") {
  const FakeCuda cuda;
  PoolOptions options = device_options(4, 4);
  options.zero_on_alloc = true;
  const auto pool = std::make_shared<Pool>(options);
  const auto before = state_of(*pool);
  Addresses out(3);
  cuda.fail("cuMemsetD8Async", 304);
  CHECK(code_of([&] { pool->try_alloc(3, Medium::kHbm, out.data()); }) == ErrorCode::kUnsupported);
  CHECK(state_of(*pool) == before);
  cuda.fail("cuMemsetD8Async", 0);
  CHECK(pool->try_alloc(3, Medium::kHbm, out.data()));
}

TEST_CASE("a pool over an engine's tensors on a GPU swaps them") {
  const FakeCuda cuda;
  {
    DeviceArenaOptions engine_options;
    engine_options.blocks = 4;
    engine_options.segment_bytes = {64, 64};
    const auto engine = std::make_shared<DeviceArena>(engine_options);
    PoolOptions options = device_options(0, 4);
    options.adopted_hbm = AdoptedMemory{4, engine->segments(), engine, 0};
    const auto pool = std::make_shared<Pool>(options);
    CHECK(pool->on_device());
    CHECK(pool->stats().device_bytes == 0);
    const Tokens tokens = store(cuda, pool, 1, 3, 70);
    CHECK(block_is(cuda, *engine, 0, 70));
    pool->swap_out(3);
    CHECK(is_cached(cuda, pool, tokens, 70));
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("closing a pool frees its GPU memory, except what a view still shows") {
  const FakeCuda cuda;
  const auto pool = std::make_shared<Pool>(device_options(4, 4));
  auto view = pool->arena(Medium::kHbm);
  pool->close();
  CHECK(cuda.count("bytes") == std::size_t{2} << 20);
  view.reset();
  CHECK(cuda.left() == "");
}

TEST_CASE("calls that a pool on a GPU cannot do are refused before anything is done") {
  const FakeCuda cuda;
  PoolOptions pageable = device_options(4, 4);
  pageable.pin_dram = false;
  CHECK(code_of([&] { const Pool pool(pageable); }) == ErrorCode::kArgument);
  CHECK(cuda.calls() == "");
  const auto pool = std::make_shared<Pool>(device_options(4, 0));
  CHECK(code_of([&] { pool->swap_out(1); }) == ErrorCode::kState);
  ServiceOptions by_ucx;
  by_ucx.routes = {"ucx", "sock"};
  CHECK(code_of([&] { PeerNode(pool, make_ranks).start_service(by_ucx); }) == ErrorCode::kUnsupported);
}

TEST_CASE("a forked child does not touch a pool on a GPU") {
  const FakeCuda cuda;
  auto pool = std::make_shared<Pool>(device_options(4, 4));
  const std::string before = cuda.calls();
  const int status = test::run_in_child([&] {
    if (code_of([&] { pool->swap_out(1); }) != ErrorCode::kFork) return 1;
    pool.reset();
    return cuda.calls() == before ? 0 : 2;
  });
  CHECK(status == 0);
}

TEST_CASE("threads that swap a pool on a GPU in both directions see whole blocks") {
  const FakeCuda cuda;
  cuda.set("delay_us", 20);
  PoolOptions options = device_options(8, 16);
  options.audit = false;
  const auto pool = std::make_shared<Pool>(options);
  std::vector<Tokens> prompts;
  for (std::size_t i = 0; i < 4; ++i) {
    prompts.push_back(store(cuda, pool, static_cast<Token>(i + 1), 2, static_cast<std::uint8_t>(50 * i + 1)));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::minstd_rand dice(t + 1);
      for (int round = 0; round < 15; ++round) {
        if (dice() % 3 == 0) pool->swap_out(1 + dice() % 4);
        const std::size_t which = dice() % prompts.size();
        const Found found = match(pool, prompts[which]);
        if (found.addresses.empty()) continue;
        Addresses arrived(found.addresses.size());
        const auto error = error_of([&] {
          const Pins pins(pool, pool->swap_in(found.addresses, {}, arrived.data()));
          for (std::size_t i = 0; i < arrived.size(); ++i) {
            const auto value = static_cast<std::uint8_t>(50 * which + 1 + i);
            wrong += is_filled(cuda, *pool, arrived[i], value) ? 0 : 1;
          }
        });
        wrong += error && error->code() != ErrorCode::kOutOfBlocks ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  pool->audit();
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
