// Blocks between a GPU and page-locked memory: bit by bit, whether a kernel, a batch or single copies move them.
#include <doctest/doctest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "device_kit.h"
#include "tiers_kit.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool {
using namespace testing::tiers;  // NOLINT(google-build-using-namespace)
namespace {

using testing::block_is;
using testing::FakeCuda;
using testing::fill_block;
using testing::StreamKernels;

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

}  // namespace
}  // namespace kvpool

#endif  // KVPOOL_FAKE_CUDA
