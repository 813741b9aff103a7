// The kernels against their references, bit for bit: random jobs in device memory and in pinned host memory, on either
// side and on both. Whole buffers are compared, so that a byte written beside its place is found as well.
//
// One program has these cases on a GPU (tests/gpu/kernels_gpu_test.cpp) and one on the CPU, where the same kernels are
// compiled by the host's compiler and run in the fake driver's streams (host_kernels_test.cpp). Included by these two
// files alone, behind what tells them what a GPU is here: Where, Shared, GpuStream, GpuHere, kernels(), kOnCpu.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool::cuda {

using testing::GpuStream;
using testing::Shared;
using testing::Where;

// A thread of the CPU does the work of thousands.
constexpr std::size_t gpu_or_cpu(std::size_t on_gpu, std::size_t on_cpu) { return testing::kOnCpu ? on_cpu : on_gpu; }

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(std::size_t bytes, testing::Dice& dice) {
  Bytes result(bytes);
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = dice.any();
    std::memcpy(result.data() + at, &word, std::min(bytes - at, sizeof word));
  }
  return result;
}

// A job with offsets in its strips, for the two buffers that it will run in.
struct Draft {
  std::vector<PlannedStrip> strips;
  std::vector<BlockPair> pairs;
  std::size_t from_bytes = 0;
  std::size_t to_bytes = 0;

  // The strips in these buffers.
  std::vector<PlannedStrip> in(const std::byte* from, std::byte* to) const {
    std::vector<PlannedStrip> placed = strips;
    for (PlannedStrip& strip : placed) {
      strip.from = from + reinterpret_cast<std::uintptr_t>(strip.from);
      strip.to = to + reinterpret_cast<std::uintptr_t>(strip.to);
    }
    return placed;
  }
};

// Strips of next_bytes() each, at distances that are multiples of `align`, beginning `offset` off.
template <class Next>
Draft draft(testing::Dice& dice, std::size_t align, std::size_t offset, std::uint32_t blocks_max, std::uint32_t strips,
            Next next_bytes) {
  const auto round = [&](std::size_t bytes) { return (bytes + align - 1) / align * align; };
  Draft job;
  job.from_bytes = offset;
  job.to_bytes = offset;
  const std::uint32_t from_blocks = 1 + dice.below(blocks_max);
  const std::uint32_t to_blocks = 1 + dice.below(blocks_max);
  std::vector<std::uint32_t> from(from_blocks);
  std::vector<std::uint32_t> to(to_blocks);
  std::iota(from.begin(), from.end(), 0u);
  std::iota(to.begin(), to.end(), 0u);
  for (auto* all : {&from, &to}) {
    for (std::size_t i = all->size(); i > 1; --i) std::swap((*all)[i - 1], (*all)[dice.below(i)]);
  }
  for (std::size_t i = 0; i < std::min(from.size(), to.size()); ++i) job.pairs.push_back({from[i], to[i]});
  for (std::uint32_t s = 0; s < strips; ++s) {
    const std::size_t bytes = next_bytes();
    const std::size_t from_stride = round(bytes + dice.below(48));
    const std::size_t to_stride = round(bytes + dice.below(48));
    job.strips.push_back(PlannedStrip{reinterpret_cast<const std::byte*>(job.from_bytes),
                                      reinterpret_cast<std::byte*>(job.to_bytes), bytes, from_stride, to_stride});
    job.from_bytes += from_blocks * from_stride;
    job.to_bytes += to_blocks * to_stride;
  }
  return job;
}

// Runs a job by the kernel and by the reference over the same content.
inline void compare(testing::Dice& dice, const Draft& job, Where from_where, Where to_where, bool table) {
  Bytes from = random_bytes(job.from_bytes, dice);
  Bytes to = random_bytes(job.to_bytes, dice);
  Shared gpu_from(from.size(), from_where);
  Shared gpu_to(to.size(), to_where);
  gpu_from.set(from);
  gpu_to.set(to);
  const std::size_t table_bytes = table_bytes_of(job.strips.size(), job.pairs.size());
  Shared table_host(table_bytes, Where::kPinned);
  Shared table_device(table_bytes, Where::kDevice);
  LaunchOptions options;
  if (table) options.table = {table_host.data(), table_device.data(), table_bytes};
  options.thread_blocks_max = dice.one_in(3) ? 1 + dice.below(8) : 0;

  const auto on_host = job.in(from.data(), to.data());
  const auto on_gpu = job.in(gpu_from.data(), gpu_to.data());
  REQUIRE(reference_kernels().copy({on_host, job.pairs}, nullptr, {}) == 0);
  GpuStream stream;
  REQUIRE(testing::kernels().copy({on_gpu, job.pairs}, stream.get(), options) == 0);
  stream.wait();
  CHECK(gpu_to.get() == to);
  CHECK(gpu_from.get() == from);
}

inline Where any_place(testing::Dice& dice) { return dice.one_in(3) ? Where::kPinned : Where::kDevice; }

TEST_CASE_FIXTURE(testing::GpuHere, "copies are those of the reference, wherever the two sides are") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    CAPTURE(seed);
    testing::Dice dice(seed);
    for (int i = 0; i < testing::fuzz_length(60); ++i) {
      const std::size_t align = std::size_t{1} << dice.below(5);
      const std::size_t longest = dice.one_in(4) ? gpu_or_cpu(100'000, 5'000) : gpu_or_cpu(5'000, 500);
      const std::size_t same = dice.one_in(2) ? 1 + dice.below(longest) : 0;
      const Draft job = draft(dice, align, dice.below(2) * align, gpu_or_cpu(40, 5), 1 + dice.below(gpu_or_cpu(20, 6)),
                              [&] { return same != 0 ? same : 1 + dice.below(longest); });
      compare(dice, job, any_place(dice), any_place(dice), dice.one_in(2));
    }
  }
}

TEST_CASE_FIXTURE(testing::GpuHere, "thousands of blocks, by the arguments of a launch and by a table") {
  testing::Dice dice(1);
  for (const bool table : {false, true}) {
    for (const std::size_t bytes : {std::size_t{16}, gpu_or_cpu(2048, 32), gpu_or_cpu(16384, 48)}) {
      const Draft job = draft(dice, 16, 0, 9000, gpu_or_cpu(3, 1), [&] { return bytes; });
      compare(dice, job, Where::kDevice, Where::kDevice, table);
    }
  }
}

TEST_CASE_FIXTURE(testing::GpuHere, "a launch follows what its stream did before, and what comes after follows it") {
  const std::size_t bytes = gpu_or_cpu(std::size_t{256} << 20, std::size_t{1} << 20);
  Shared from(bytes, Where::kDevice);
  Shared to(bytes, Where::kDevice);
  Shared seen(bytes, Where::kPinned);
  const std::vector<PlannedStrip> strips{{from.data(), to.data(), 65536, 65536, 65536}};
  std::vector<BlockPair> pairs;
  for (std::uint32_t i = 0; i < bytes / 65536; ++i)
    pairs.push_back({i, static_cast<std::uint32_t>(bytes / 65536) - 1 - i});
  GpuStream stream;
  from.set(Bytes(bytes, std::byte{1}));
  to.set(Bytes(bytes, std::byte{1}));
  // Each step takes the device a while; if one did not wait for the one before, ones would be left.
  stream.fill(from.data(), 2, bytes);
  REQUIRE(testing::kernels().copy({strips, pairs}, stream.get(), {}) == 0);
  stream.copy(seen.data(), to.data(), bytes);
  stream.fill(from.data(), 3, bytes);
  stream.wait();
  CHECK(std::all_of(seen.data(), seen.data() + bytes, [](std::byte one) { return one == std::byte{2}; }));
}

}  // namespace kvpool::cuda
