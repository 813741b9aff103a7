// What the kernels do, as plainly as it can be said.
#include <cstring>

#include "kvpool/cuda/fp8.h"
#include "kvpool/cuda/kernel_plan.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool::cuda {
namespace {

// Calls piece(strip index, source, destination) for each strip of each pair.
template <class Piece>
void for_each_piece(std::span<const PlannedStrip> strips, std::span<const BlockPair> pairs, Piece piece) {
  for (const BlockPair& pair : pairs) {
    for (std::size_t s = 0; s < strips.size(); ++s) {
      piece(s, strips[s].from + pair.from * strips[s].from_stride, strips[s].to + pair.to * strips[s].to_stride);
    }
  }
}

int copy(const CopyJob& job, Stream, const LaunchOptions&) {
  check_job(job);
  for_each_piece(job.strips, job.pairs, [&](std::size_t s, const std::byte* from, std::byte* to) {
    std::memcpy(to, from, job.strips[s].bytes);
  });
  return 0;
}

int permute(const PermuteJob& job, Stream, const LaunchOptions&) {
  check_job(job);
  const RowShape& rows = job.rows;
  for_each_piece(job.strips, job.pairs, [&](std::size_t, const std::byte* from, std::byte* to) {
    for (std::uint64_t o = 0; o < rows.outer; ++o) {
      for (std::uint64_t i = 0; i < rows.inner; ++i) {
        std::memcpy(to + o * rows.to_outer_pitch + i * rows.to_inner_pitch,
                    from + o * rows.from_outer_pitch + i * rows.from_inner_pitch, rows.row_bytes);
      }
    }
  });
  return 0;
}

int to_fp8(const Fp8Job& job, Stream, const LaunchOptions&) {
  check_job(job);
  for_each_piece(job.strips, job.pairs, [&](std::size_t s, const std::byte* from, std::byte* to) {
    const float scale = job.scales[job.scales.size() == 1 ? 0 : s];
    for (std::size_t value = 0; value < job.strips[s].bytes / 2; ++value) {
      std::uint16_t half;
      std::memcpy(&half, from + 2 * value, sizeof(half));
      to[value] = std::byte{e4m3_of_half(half, job.from == HalfType::kBfloat16, scale)};
    }
  });
  return 0;
}

const char* result_name(int result) { return result == 0 ? "success" : "unknown"; }

}  // namespace

const KernelSet& reference_kernels() noexcept {
  static constexpr KernelSet kSet{"reference", copy, permute, to_fp8, result_name, [] { return 0; }};
  return kSet;
}

}  // namespace kvpool::cuda
