#include "kvpool/blocks/device_mover.h"

#include <doctest/doctest.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/error.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool {
namespace {

using testing::block_is;
using testing::code_of;
using testing::dawdle;
using testing::EngineStream;
using testing::FakeCuda;
using testing::fill_block;
using testing::StreamKernels;

using Addresses = std::vector<Address>;
using Pieces = std::vector<std::size_t>;

Address hbm(std::uint32_t block) { return make_address(0, Medium::kHbm, 1, block); }
Address dram(std::uint32_t block) { return make_address(0, Medium::kDram, 1, block); }

// A tier on a GPU and one in page-locked memory.
struct Tiers {
  explicit Tiers(std::uint32_t blocks = 8, Pieces device_pieces = {512, 512}, Pieces host_pieces = {1024},
                 const cuda::KernelSet* kernels = nullptr)
      : device(std::make_unique<DeviceArena>(device_options(blocks, std::move(device_pieces)))),
        host(make_owned_arena(host_options(blocks, std::move(host_pieces)))),
        mover(std::make_unique<DeviceMover>(*device, *host, kernels)) {}

  static DeviceArenaOptions device_options(std::uint32_t blocks, Pieces pieces) {
    DeviceArenaOptions options;
    options.blocks = blocks;
    options.segment_bytes = std::move(pieces);
    return options;
  }
  static ArenaOptions host_options(std::uint32_t blocks, Pieces pieces) {
    ArenaOptions options;
    options.blocks = blocks;
    options.segment_bytes = std::move(pieces);
    options.huge_pages = HugePages::kNever;
    options.pin = true;
    options.pin_device = 0;
    options.commit_threads = 1;
    return options;
  }
  void out(std::uint32_t from, std::uint32_t to, const CallerStream& after = {}) const {
    const Address source = hbm(from);
    const Address target = dram(to);
    mover->move(TierWay::kOut, &source, &target, 1, after);
  }
  void in(std::uint32_t from, std::uint32_t to, const CallerStream& after = {}) const {
    const Address source = dram(from);
    const Address target = hbm(to);
    mover->move(TierWay::kIn, &source, &target, 1, after);
  }

  std::unique_ptr<DeviceArena> device;
  std::shared_ptr<Arena> host;
  std::unique_ptr<DeviceMover> mover;
};

// The bytes of a block's content, wherever its pieces lie.
std::vector<std::byte> content_of(const FakeCuda& cuda, const Arena& arena, std::uint32_t block) {
  std::vector<std::byte> content;
  for (const Segment& segment : arena.segments()) {
    const std::byte* piece = cuda.host(segment.base + block * segment.stride, segment.bytes);
    content.insert(content.end(), piece, piece + segment.bytes);
  }
  return content;
}

// All bytes of all blocks are different from one test to the next.
void fill_random(const FakeCuda& cuda, const Arena& arena, unsigned seed) {
  std::minstd_rand dice(seed);
  for (const Segment& segment : arena.segments()) {
    std::byte* bytes = cuda.host(segment.base, segment.stride * arena.blocks());
    for (std::size_t i = 0; i < segment.stride * arena.blocks(); ++i) bytes[i] = static_cast<std::byte>(dice() >> 8);
  }
}

// Pieces that sum to `bytes`, cut anywhere.
Pieces random_pieces(std::minstd_rand& dice, std::size_t bytes) {
  Pieces pieces;
  while (bytes > 0) {
    const std::size_t piece = dice() % 3 == 0 ? bytes : 1 + dice() % bytes;
    pieces.push_back(piece);
    bytes -= piece;
  }
  return pieces;
}

Addresses shuffled(std::minstd_rand& dice, std::uint32_t blocks, std::size_t n, Address (*make)(std::uint32_t)) {
  Addresses all;
  for (std::uint32_t i = 0; i < blocks; ++i) all.push_back(make(i));
  if (dice() % 3 != 0) std::shuffle(all.begin(), all.end(), dice);
  all.resize(n);
  return all;
}

TEST_CASE("blocks of any layout cross to the host and back bit by bit, whatever copies them") {
  enum class By { kBatchV2, kBatchV1, kPieces, kKernel };
  std::minstd_rand dice(7);
  for (const By by : {By::kBatchV2, By::kBatchV1, By::kPieces, By::kKernel}) {
    for (int round = 0; round < 6; ++round) {
      const FakeCuda cuda;
      const StreamKernels kernels(cuda);
      cuda.set("version", by == By::kBatchV2 ? 13000 : by == By::kBatchV1 ? 12080 : 12070);
      cuda.set("delay_us", 0);
      {
        const std::uint32_t blocks = 1 + dice() % 12;
        const std::size_t bytes = 1 + dice() % 3000;
        const Tiers tiers(blocks, random_pieces(dice, bytes), random_pieces(dice, bytes),
                          by == By::kKernel ? &kernels.set() : nullptr);
        fill_random(cuda, *tiers.device, static_cast<unsigned>(dice()));
        fill_random(cuda, *tiers.host, static_cast<unsigned>(dice()));
        const std::size_t n = 1 + dice() % blocks;
        const Addresses from = shuffled(dice, blocks, n, hbm);
        const Addresses to = shuffled(dice, blocks, n, dram);
        std::vector<std::vector<std::byte>> wanted;
        for (std::uint32_t i = 0; i < blocks; ++i) wanted.push_back(content_of(cuda, *tiers.host, i));
        for (std::size_t i = 0; i < n; ++i)
          wanted[block_of(to[i])] = content_of(cuda, *tiers.device, block_of(from[i]));
        const int launches = StreamKernels::launches();
        tiers.mover->move(TierWay::kOut, from.data(), to.data(), n, std::nullopt);
        for (std::uint32_t i = 0; i < blocks; ++i) CHECK(content_of(cuda, *tiers.host, i) == wanted[i]);

        const Addresses back = shuffled(dice, blocks, n, hbm);
        tiers.mover->move(TierWay::kIn, to.data(), back.data(), n, std::nullopt);
        for (std::size_t i = 0; i < n; ++i) {
          CHECK(content_of(cuda, *tiers.device, block_of(back[i])) == wanted[block_of(to[i])]);
        }
        CHECK(StreamKernels::launches() - launches == (by == By::kKernel ? 2 : 0));
        CHECK((cuda.count("cuMemcpyBatchAsync") == 0 || by == By::kBatchV1));
        CHECK((cuda.count("cuMemcpyBatchAsync_v2") == 0 || by == By::kBatchV2));
        CHECK(cuda.count("pageable") == 0);
      }
      CHECK(cuda.left() == "");
    }
  }
}

TEST_CASE("large pieces go by the copy engines, small ones by a kernel") {
  const FakeCuda cuda;
  const StreamKernels kernels(cuda);
  constexpr std::size_t kLarge = kKernelPieceBytesGuess + 4096;
  const Tiers large(3, {kLarge, kLarge}, {kLarge, kLarge}, &kernels.set());
  const int launches = StreamKernels::launches();
  large.out(0, 1);
  CHECK(StreamKernels::launches() == launches);
  CHECK(cuda.count("cuMemcpyBatchAsync_v2") == 1);
  const Tiers small(3, {kLarge / 16}, {kLarge / 16}, &kernels.set());
  small.out(0, 1);
  CHECK(StreamKernels::launches() == launches + 1);
}

TEST_CASE("where kernels cannot run, the copy engines copy and the kernels are not tried again") {
  const FakeCuda cuda;
  const StreamKernels kernels(cuda);
  const Tiers tiers(4, {512, 512}, {1024}, &kernels.set());
  fill_block(cuda, *tiers.device, 0, 4);
  StreamKernels::answer() = 209;  // CUDA_ERROR_NO_BINARY_FOR_GPU
  const int launches = StreamKernels::launches();
  tiers.out(0, 1);
  tiers.out(0, 2);
  CHECK(StreamKernels::launches() == launches + 1);
  CHECK(block_is(cuda, *tiers.host, 1, 4));
  CHECK(block_is(cuda, *tiers.host, 2, 4));
}

TEST_CASE("where batched copies are not supported, the copies go one by one") {
  const FakeCuda cuda;
  const Tiers tiers(4, {512, 512}, {512, 512});
  fill_block(cuda, *tiers.device, 0, 6);
  cuda.fail("cuMemcpyBatchAsync_v2", 801);
  tiers.out(0, 1);
  tiers.out(0, 2);
  CHECK(cuda.count("cuMemcpyBatchAsync_v2") == 1);
  CHECK(cuda.count("cuMemcpyAsync") == 4);
  CHECK(block_is(cuda, *tiers.host, 1, 6));
  CHECK(block_is(cuda, *tiers.host, 2, 6));
}

TEST_CASE("where the driver refuses a correct batch, its pieces go one by one") {
  for (const bool by_setting : {false, true}) {
    const FakeCuda cuda;
    if (by_setting) setenv("KVPOOL_CUDA_BATCHES", "0", 1);
    const Tiers tiers(4, {512, 512}, {512, 512});
    unsetenv("KVPOOL_CUDA_BATCHES");
    fill_block(cuda, *tiers.device, 0, 6);
    cuda.fail("cuMemcpyBatchAsync_v2", 1);
    tiers.out(0, 1);
    tiers.out(0, 2);
    CHECK(cuda.count("cuMemcpyBatchAsync_v2") == (by_setting ? 0 : 1));
    CHECK(cuda.count("cuMemcpyAsync") == 4);
    CHECK(block_is(cuda, *tiers.host, 1, 6));
    CHECK(block_is(cuda, *tiers.host, 2, 6));
  }
}

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
