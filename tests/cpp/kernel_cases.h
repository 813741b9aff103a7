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
  for (std::byte& one : result) one = static_cast<std::byte>(dice.any());
  return result;
}

// A job whose strips hold offsets, for the two buffers that it will be run in.
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

// Strips of `read` bytes that become `written`, at distances that are multiples of `align`, beginning `offset` off.
struct Lengths {
  std::size_t bytes;  // of the strip, as the job counts them
  std::size_t read;   // from the first byte to behind the last
  std::size_t written;
};

template <class Next>
Draft draft(testing::Dice& dice, std::size_t align, std::size_t offset, std::uint32_t blocks_max, std::uint32_t strips,
            Next next_lengths) {
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
    const Lengths lengths = next_lengths();
    const std::size_t from_stride = round(lengths.read + dice.below(48));
    const std::size_t to_stride = round(lengths.written + dice.below(48));
    job.strips.push_back(PlannedStrip{reinterpret_cast<const std::byte*>(job.from_bytes),
                                      reinterpret_cast<std::byte*>(job.to_bytes), lengths.bytes, from_stride,
                                      to_stride});
    job.from_bytes += from_blocks * from_stride;
    job.to_bytes += to_blocks * to_stride;
  }
  return job;
}

// Runs a job by the kernel and by the reference over the same content. `make`: strips -> job. `run`: of a set.
template <class Make, class Run>
void compare(testing::Dice& dice, const Draft& job, Where from_where, Where to_where, bool table, Make make, Run run) {
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
  REQUIRE(run(reference_kernels(), make(on_host), nullptr, LaunchOptions{}) == 0);
  GpuStream stream;
  REQUIRE(run(testing::kernels(), make(on_gpu), stream.get(), options) == 0);
  stream.wait();
  CHECK(gpu_to.get() == to);
  CHECK(gpu_from.get() == from);
}

inline const auto run_copy = [](const KernelSet& set, const CopyJob& job, Stream stream, const LaunchOptions& options) {
  return set.copy(job, stream, options);
};
inline const auto run_permute = [](const KernelSet& set, const PermuteJob& job, Stream stream,
                                   const LaunchOptions& options) { return set.permute(job, stream, options); };
inline const auto run_fp8 = [](const KernelSet& set, const Fp8Job& job, Stream stream, const LaunchOptions& options) {
  return set.to_fp8(job, stream, options);
};

inline Where any_place(testing::Dice& dice) { return dice.one_in(3) ? Where::kPinned : Where::kDevice; }

TEST_CASE_FIXTURE(testing::GpuHere, "copies are those of the reference, wherever the two sides are") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    CAPTURE(seed);
    testing::Dice dice(seed);
    for (int i = 0; i < testing::fuzz_length(60); ++i) {
      const std::size_t align = std::size_t{1} << dice.below(5);
      const std::size_t longest = dice.one_in(4) ? gpu_or_cpu(100'000, 5'000) : gpu_or_cpu(5'000, 500);
      const std::size_t same = dice.one_in(2) ? 1 + dice.below(longest) : 0;
      const Draft job =
          draft(dice, align, dice.below(2) * align, gpu_or_cpu(40, 5), 1 + dice.below(gpu_or_cpu(20, 6)), [&] {
            const std::size_t bytes = same != 0 ? same : 1 + dice.below(longest);
            return Lengths{bytes, bytes, bytes};
          });
      compare(
          dice, job, any_place(dice), any_place(dice), dice.one_in(2),
          [&](const auto& strips) { return CopyJob{strips, job.pairs}; }, run_copy);
    }
  }
}

TEST_CASE_FIXTURE(testing::GpuHere, "thousands of blocks, by the arguments of a launch and by a table") {
  testing::Dice dice(1);
  for (const bool table : {false, true}) {
    for (const std::size_t bytes : {std::size_t{16}, gpu_or_cpu(2048, 32), gpu_or_cpu(16384, 48)}) {
      const Draft job = draft(dice, 16, 0, 9000, gpu_or_cpu(3, 1), [&] { return Lengths{bytes, bytes, bytes}; });
      compare(
          dice, job, Where::kDevice, Where::kDevice, table,
          [&](const auto& strips) { return CopyJob{strips, job.pairs}; }, run_copy);
    }
  }
}

TEST_CASE_FIXTURE(testing::GpuHere, "permuted rows are those of the reference") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    CAPTURE(seed);
    testing::Dice dice(seed);
    for (int i = 0; i < testing::fuzz_length(60); ++i) {
      const std::size_t align = std::size_t{1} << dice.below(5);
      RowShape rows = dice.one_in(2)
                          ? head_major_to_token_major(1 + dice.below(12), 1 + dice.below(gpu_or_cpu(40, 8)),
                                                      static_cast<std::uint32_t>(align * (1 + dice.below(24))))
                          : token_major_to_head_major(1 + dice.below(12), 1 + dice.below(gpu_or_cpu(40, 8)),
                                                      static_cast<std::uint32_t>(align * (1 + dice.below(24))));
      const std::size_t bytes = std::size_t{rows.outer} * rows.inner * rows.row_bytes;
      std::size_t written = bytes;
      if (dice.one_in(2)) {  // heads of another rank lie between those of this one
        const std::uint64_t gap = align * dice.below(5);
        if (rows.to_outer_pitch > rows.to_inner_pitch) {
          rows.to_outer_pitch += gap;
          written += (rows.outer - 1) * gap;
        } else {
          rows.to_inner_pitch += gap;
          written += (rows.inner - 1) * gap;
        }
      }
      const Draft job = draft(dice, align, 0, gpu_or_cpu(20, 3), 1 + dice.below(gpu_or_cpu(8, 3)),
                              [&] { return Lengths{bytes, bytes, written}; });
      compare(
          dice, job, any_place(dice), any_place(dice), dice.one_in(2),
          [&](const auto& strips) { return PermuteJob{strips, job.pairs, rows}; }, run_permute);
    }
  }
}

TEST_CASE_FIXTURE(testing::GpuHere, "fp8 values are those of the reference") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    CAPTURE(seed);
    testing::Dice dice(seed);
    for (int i = 0; i < testing::fuzz_length(40); ++i) {
      const std::size_t align = std::size_t{2} << dice.below(4);
      const Draft job =
          draft(dice, align, dice.below(2) * align, gpu_or_cpu(20, 4), 1 + dice.below(gpu_or_cpu(8, 3)), [&] {
            const std::size_t values =
                1 + dice.below(dice.one_in(4) ? gpu_or_cpu(40'000, 3'000) : gpu_or_cpu(1500, 300));
            return Lengths{2 * values, 2 * values, values};
          });
      std::vector<float> scales(dice.one_in(2) ? 1 : job.strips.size());
      for (float& scale : scales) scale = 0.01f * static_cast<float>(1 + dice.below(500));
      const HalfType type = dice.one_in(2) ? HalfType::kFloat16 : HalfType::kBfloat16;
      compare(
          dice, job, any_place(dice), any_place(dice), dice.one_in(2),
          [&](const auto& strips) { return Fp8Job{strips, job.pairs, type, scales}; }, run_fp8);
    }
  }
}

TEST_CASE_FIXTURE(testing::GpuHere,
                  "all 16-bit floats become the same e4m3 on the GPU as on the CPU, whatever the scale") {
  std::vector<std::uint16_t> halves(65536);
  std::iota(halves.begin(), halves.end(), std::uint16_t{0});
  const auto* begin = reinterpret_cast<const std::byte*>(halves.data());
  const Bytes from(begin, begin + 2 * halves.size());
  Shared gpu_from(from.size(), Where::kDevice);
  gpu_from.set(from);
  Shared gpu_to(halves.size(), Where::kDevice);
  Bytes to(halves.size());
  const std::vector<BlockPair> pairs{{0, 0}};
  GpuStream stream;
  for (const HalfType type : {HalfType::kFloat16, HalfType::kBfloat16}) {
    for (const float scale : {1.0f, 0.5f, 3.7f, 1e-3f, 1e4f, -2.0f, 0x1p-126f, 0x1p127f}) {
      // By eights, and one by one: the second half begins at an odd place of the destination.
      const std::vector<PlannedStrip> on_host{{from.data(), to.data(), from.size(), from.size(), to.size()}};
      REQUIRE(reference_kernels().to_fp8({on_host, pairs, type, std::span(&scale, 1)}, nullptr, {}) == 0);
      const std::vector<PlannedStrip> on_gpu{{gpu_from.data(), gpu_to.data(), from.size(), from.size(), to.size()}};
      REQUIRE(testing::kernels().to_fp8({on_gpu, pairs, type, std::span(&scale, 1)}, stream.get(), {}) == 0);
      stream.wait();
      CHECK(gpu_to.get() == to);
      gpu_to.set(Bytes(to.size(), std::byte{0xEE}));
      const std::vector<PlannedStrip> narrow{
          {gpu_from.data(), gpu_to.data(), 2 * 999, 2 * 999, 999},
          {gpu_from.data() + 2 * 999, gpu_to.data() + 999, from.size() - 2 * 999, 0, to.size()}};
      REQUIRE(testing::kernels().to_fp8({narrow, pairs, type, std::span(&scale, 1)}, stream.get(), {}) == 0);
      stream.wait();
      CHECK(gpu_to.get() == to);
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
