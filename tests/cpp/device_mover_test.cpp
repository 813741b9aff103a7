// Blocks between a GPU and page-locked memory: after which streams they are copied, and what a failing driver leaves.
#include "kvpool/blocks/device_mover.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "device_kit.h"
#include "kvpool/base/error.h"
#include "thrown.h"
#include "tiers_kit.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool {
using namespace testing::tiers;  // NOLINT(google-build-using-namespace)
namespace {

using testing::block_is;
using testing::code_of;
using testing::dawdle;
using testing::EngineStream;
using testing::FakeCuda;
using testing::fill_block;
using testing::StreamKernels;

TEST_CASE("a stream of a green context of the GPU may be named") {
  const FakeCuda cuda;
  const Tiers tiers;
  const EngineStream green(cuda);
  cuda.find<fake_cuda::MakeGreenFunction>("fake_cuda_make_green")(green.handle());
  fill_block(cuda, *tiers.device, 0, 3);
  tiers.out(0, 1, green.handle());
  CHECK(block_is(cuda, *tiers.host, 1, 3));
  // A driver that has no such call does not know that it is a part of the primary context.
  cuda.set("version", 12040);
  const Tiers older;
  CHECK(code_of([&] { older.out(0, 1, green.handle()); }) == ErrorCode::kArgument);
}

TEST_CASE("losing the GPU in a kernel is reported as DeviceLost") {
  const FakeCuda cuda;
  const StreamKernels kernels(cuda);
  const Tiers tiers(4, {512, 512}, {1024}, &kernels.set());
  StreamKernels::answer() = 700;
  CHECK(code_of([&] { tiers.out(0, 1); }) == ErrorCode::kDeviceLost);
}

TEST_CASE("data that the caller's stream still writes is copied out once it is written") {
  const FakeCuda cuda;
  const Tiers tiers;
  const EngineStream engine(cuda);
  for (const bool whole_device : {false, true}) {
    fill_block(cuda, *tiers.device, 2, 1);
    engine.run([&] {
      dawdle();
      fill_block(cuda, *tiers.device, 2, 77);
    });
    tiers.out(2, 5, whole_device ? CallerStream() : CallerStream(engine.handle()));
    CHECK(block_is(cuda, *tiers.host, 5, 77));
  }
}

TEST_CASE("data that the caller's stream still reads is not overwritten before it is read") {
  const FakeCuda cuda;
  const Tiers tiers;
  const EngineStream engine(cuda);
  for (const bool whole_device : {false, true}) {
    fill_block(cuda, *tiers.device, 3, 10);
    fill_block(cuda, *tiers.host, 1, 20);
    std::atomic<bool> was_old{false};
    engine.run([&] {
      dawdle();
      was_old = block_is(cuda, *tiers.device, 3, 10);
    });
    tiers.in(1, 3, whole_device ? CallerStream() : CallerStream(engine.handle()));
    CHECK(block_is(cuda, *tiers.device, 3, 20));
    CHECK(was_old);
  }
}

TEST_CASE("a copy waits only for the stream that it was given") {
  const FakeCuda cuda;
  const Tiers tiers;
  const EngineStream engine(cuda);
  const EngineStream busy(cuda);
  std::atomic<bool> let_go{false};
  busy.run([&] {
    for (int i = 0; i < 30'000 && !let_go; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  fill_block(cuda, *tiers.device, 0, 9);
  tiers.out(0, 0, engine.handle());
  CHECK(block_is(cuda, *tiers.host, 0, 9));
  let_go = true;
  busy.wait();
}

TEST_CASE("both directions are under way at once") {
  const FakeCuda cuda;
  const Tiers tiers;
  const EngineStream engine(cuda);
  const EngineStream other(cuda);
  std::atomic<bool> let_go{false};
  std::atomic<bool> is_out{false};
  engine.run([&] {
    for (int i = 0; i < 30'000 && !let_go; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  std::thread out([&] {
    tiers.out(0, 0, engine.handle());
    is_out = true;
  });
  fill_block(cuda, *tiers.host, 1, 44);
  tiers.in(1, 1, other.handle());
  CHECK(block_is(cuda, *tiers.device, 1, 44));
  CHECK_FALSE(is_out);
  let_go = true;
  out.join();
}

TEST_CASE("the default streams may be named, a stream of another GPU may not") {
  const FakeCuda cuda;
  const Tiers tiers;
  const EngineStream other_gpu(cuda, 1);
  fill_block(cuda, *tiers.device, 0, 3);
  for (const std::uintptr_t number : {0, 1, 2}) {
    tiers.out(0, static_cast<std::uint32_t>(number), reinterpret_cast<CuStream>(number));
    CHECK(block_is(cuda, *tiers.host, static_cast<std::uint32_t>(number), 3));
  }
  fill_block(cuda, *tiers.host, 5, 50);
  CHECK(code_of([&] { tiers.out(0, 5, other_gpu.handle()); }) == ErrorCode::kArgument);
  CHECK(block_is(cuda, *tiers.host, 5, 50));
}

TEST_CASE("if any driver call fails in a copy, nothing is written after the error is thrown") {
  for (const bool has_batch : {true, false}) {
    int failures = 0;
    for (int n = 1;; ++n) {
      CAPTURE(n);
      const FakeCuda cuda;
      cuda.set("version", has_batch ? 13000 : 12000);
      {
        const Tiers tiers;
        const EngineStream engine(cuda);
        const Addresses from{hbm(0), hbm(3), hbm(5)};
        const Addresses to{dram(1), dram(0), dram(7)};
        for (std::uint32_t i = 0; i < 8; ++i) fill_block(cuda, *tiers.device, i, static_cast<std::uint8_t>(i + 1));
        cuda.fail_nth(n, 304);
        const auto code =
            code_of([&] { tiers.mover->move(TierWay::kOut, from.data(), to.data(), 3, engine.handle()); });
        cuda.fail_nth(0, 0);
        failures += code ? 1 : 0;
        if (code) CHECK(*code == ErrorCode::kUnsupported);
        if (code) {
          // Blocks that the copy gave up have another owner now.
          for (const Address address : to) fill_block(cuda, *tiers.host, block_of(address), 200);
          dawdle();
          for (const Address address : to) CHECK(block_is(cuda, *tiers.host, block_of(address), 200));
        }
        tiers.mover->move(TierWay::kOut, from.data(), to.data(), 3, engine.handle());
        for (std::size_t i = 0; i < 3; ++i) {
          CHECK(block_is(cuda, *tiers.host, block_of(to[i]), static_cast<std::uint8_t>(block_of(from[i]) + 1)));
        }
      }
      const bool reached = cuda.failed();
      CHECK(cuda.left() == "");
      if (!reached && n > 3) break;
    }
    CHECK(failures >= 6);
  }
}

TEST_CASE("if any driver call fails when a mover is made, nothing is left behind") {
  int failures = 0;
  for (int n = 1;; ++n) {
    CAPTURE(n);
    const FakeCuda cuda;
    {
      const Tiers tiers;
      cuda.fail_nth(n, 304);
      const auto code = code_of([&] {
        const DeviceMover mover(*tiers.device, *tiers.host, nullptr);
        cuda.fail_nth(0, 0);
      });
      if (code) CHECK(*code == ErrorCode::kUnsupported);
      failures += code ? 1 : 0;
    }
    CHECK(cuda.left() == "");
    if (!cuda.failed()) break;
  }
  CHECK(failures == 6);
}

TEST_CASE("losing the GPU in a copy is reported as DeviceLost") {
  for (const int code : {700, 709, 719}) {
    const FakeCuda cuda;
    {
      const Tiers tiers;
      cuda.lose(0, code);
      CHECK(code_of([&] { tiers.out(0, 0); }) == ErrorCode::kDeviceLost);
      CHECK(code_of([&] { tiers.in(0, 0, CuStream{}); }) == ErrorCode::kDeviceLost);
      const Address block = hbm(0);
      CHECK(code_of([&] { tiers.mover->zero(&block, 1); }) == ErrorCode::kDeviceLost);
    }
  }
}

TEST_CASE("a driver that can no longer tell whether a copy has ended counts as a lost device") {
  const FakeCuda cuda;
  const Tiers tiers;
  cuda.fail("cuStreamSynchronize", 999);
  CHECK(code_of([&] { tiers.out(0, 0); }) == ErrorCode::kDeviceLost);
  cuda.fail("cuStreamSynchronize", 0);
  tiers.out(0, 0);
}

TEST_CASE("blocks are zeroed on the GPU after its earlier work, and no other memory is") {
  const FakeCuda cuda;
  const Tiers tiers(8, {96, 160}, {256});
  const EngineStream engine(cuda);
  for (std::uint32_t i = 0; i < 8; ++i) fill_block(cuda, *tiers.device, i, 5);
  engine.run([&] {
    dawdle();
    fill_block(cuda, *tiers.device, 4, 6);
  });
  const Addresses blocks{hbm(1), hbm(4)};
  tiers.mover->zero(blocks.data(), blocks.size());
  for (std::uint32_t i = 0; i < 8; ++i) CHECK(block_is(cuda, *tiers.device, i, i == 1 || i == 4 ? 0 : 5));
}

TEST_CASE("many threads may move at once") {
  const FakeCuda cuda;
  cuda.set("delay_us", 20);
  const Tiers tiers(16);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (std::uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 10; ++round) {
        const auto value = static_cast<std::uint8_t>(16 * t + static_cast<std::uint32_t>(round) + 1);
        fill_block(cuda, *tiers.device, 4 * t, value);
        tiers.out(4 * t, 4 * t + 1);
        tiers.in(4 * t + 1, 4 * t + 2);
        wrong += block_is(cuda, *tiers.device, 4 * t + 2, value) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace kvpool

#endif  // KVPOOL_FAKE_CUDA
