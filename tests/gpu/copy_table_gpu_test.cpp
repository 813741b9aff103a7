// Copies of many blocks between the tiers and within the GPU: one launch each, by a table in the GPU's memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gpu_memory.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/copy_table.h"

namespace kvpool::testing {
namespace {

using Addresses = std::vector<Address>;

constexpr std::uint32_t kMany = 20'000;
constexpr std::size_t kBlockBytes = 4096;

std::atomic<int> by_table{0};
std::atomic<int> without{0};

// The GPU's kernels; counts the jobs that have a table.
const cuda::KernelSet& counting_kernels() {
  static const cuda::KernelSet set = [] {
    cuda::KernelSet counting = *cuda::gpu_kernels();
    counting.copy = [](const cuda::CopyJob& job, cuda::Stream stream, const cuda::LaunchOptions& options) {
      ++(options.table.bytes > 0 ? by_table : without);
      return cuda::gpu_kernels()->copy(job, stream, options);
    };
    return counting;
  }();
  return set;
}

// Blocks of a medium in any order.
Addresses shuffled(Medium medium, unsigned seed) {
  Addresses all;
  for (std::uint32_t i = 0; i < kMany; ++i) all.push_back(make_address(0, medium, 1, i));
  std::shuffle(all.begin(), all.end(), std::minstd_rand(seed));
  return all;
}

std::vector<std::byte> content(unsigned seed) {
  std::minstd_rand dice(seed);
  std::vector<std::byte> bytes(kMany * kBlockBytes);
  for (std::size_t at = 0; at < bytes.size(); at += 4) {
    const auto word = static_cast<std::uint32_t>(dice());
    std::memcpy(bytes.data() + at, &word, 4);
  }
  return bytes;
}

// What lies where block from[i] of the one has gone to block to[i] of the other.
std::vector<std::byte> moved(const std::vector<std::byte>& bytes, const Addresses& from, const Addresses& to) {
  std::vector<std::byte> result(bytes.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::memcpy(result.data() + block_of(to[i]) * kBlockBytes, bytes.data() + block_of(from[i]) * kBlockBytes,
                kBlockBytes);
  }
  return result;
}

std::vector<std::byte> bytes_of(const Arena& arena) {
  std::vector<std::byte> bytes(kMany * kBlockBytes);
  must(cudaMemcpy(bytes.data(), arena.segments()[0].base, bytes.size(), cudaMemcpyDefault));
  return bytes;
}

std::shared_ptr<Arena> on_gpu() {
  return std::make_shared<DeviceArena>(DeviceArenaOptions{.blocks = kMany, .segment_bytes = {kBlockBytes}});
}

TEST_CASE("20,000 blocks cross the bus in one launch each way") {
  const auto device = on_gpu();
  ArenaOptions options;
  options.blocks = kMany;
  options.segment_bytes = {kBlockBytes};
  options.pin = true;
  options.pin_device = 0;
  const auto host = make_owned_arena(options);
  DeviceMover mover(*device, *host, &counting_kernels());
  CHECK(mover.device_bytes() > 0);
  by_table = 0;
  without = 0;
  for (const unsigned round : {1u, 2u, 3u}) {
    const auto bytes = content(round);
    must(cudaMemcpy(device->segments()[0].base, bytes.data(), bytes.size(), cudaMemcpyDefault));
    const Addresses from = shuffled(Medium::kHbm, 10 + round);
    const Addresses to = shuffled(Medium::kDram, 20 + round);
    mover.move(TierWay::kOut, from.data(), to.data(), kMany, std::nullopt);
    const auto wanted = moved(bytes, from, to);
    CHECK(bytes_of(*host) == wanted);
    const Addresses back = shuffled(Medium::kHbm, 30 + round);
    mover.move(TierWay::kIn, to.data(), back.data(), kMany, std::nullopt);
    CHECK(bytes_of(*device) == moved(wanted, to, back));
  }
  CHECK(by_table == 6);
  CHECK(without == 0);
}

TEST_CASE("copies in one stream that are not waited for have separate tables") {
  const auto from = on_gpu();
  const auto to = on_gpu();
  const auto bytes = content(7);
  must(cudaMemcpy(from->segments()[0].base, bytes.data(), bytes.size(), cudaMemcpyDefault));
  DeviceCopier copier(from->context(), &counting_kernels(), {}, "a test");
  copier.add_tables(1, 4, 1, kMany);
  const PlannedStrip strip{from->segments()[0].base, to->segments()[0].base, kBlockBytes, kBlockBytes, kBlockBytes};
  for (const unsigned round : {1u, 2u, 3u, 4u, 5u}) {
    must(cudaMemset(to->segments()[0].base, 0, bytes.size()));
    const Addresses source = shuffled(Medium::kHbm, 40 + round);
    const Addresses target = shuffled(Medium::kHbm, 50 + round);
    by_table = 0;
    DeviceCopier::Run run(copier);
    run.begin();
    constexpr std::size_t kQuarter = kMany / 4;
    for (std::size_t i = 0; i < 4; ++i) {
      run.copy(GpuWay::kWithin, {&strip, 1}, std::span(source).subspan(i * kQuarter, kQuarter),
               std::span(target).subspan(i * kQuarter, kQuarter), true);
    }
    run.wait_for_all();
    CHECK(by_table == 4);
    CHECK(bytes_of(*to) == moved(bytes, source, target));
  }
}

}  // namespace
}  // namespace kvpool::testing
