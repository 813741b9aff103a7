// Machine code of the kernels of attention for GPUs (cuda/attention), compiled ahead of time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvpool/base/page_format.h"

namespace kvpool {

struct AttentionCubin {
  const char* name;    // of the variant and target, for messages
  const char* kernel;  // "attend_leaves" or "merge_pairs": the function in it
  const unsigned char* image;
  std::size_t bytes;
  std::uint32_t target;  // 90: sm_90
  DType dtype;           // of queries, keys and values; kNone for merge_pairs
  std::uint32_t head_dim;
  std::uint32_t rows;  // that a thread block computes: query rows of a KV head, or rows of a node
  std::uint32_t tile;  // tokens that it computes together; 0 for merge_pairs
  std::uint32_t threads;
  std::uint32_t shared_bytes;
};

// Those of this build: none if it was made without Triton (docs/how-to/gpu-build.md).
std::span<const AttentionCubin> attention_cubins() noexcept;
// "Triton 3.9.0, source 0123456789abcdef"; empty without cubins.
const char* attention_cubins_source() noexcept;

// Whether a GPU of this compute capability runs code for the target. From 9.0 on the code uses what only one
// compute capability has (sm_90a); before, it runs on all of the same major number from its minor one on.
constexpr bool runs_on(std::uint32_t target, std::uint32_t major, std::uint32_t minor) noexcept {
  if (target / 10 != major) return false;
  return target < 90 ? minor >= target % 10 : minor == target % 10;
}

}  // namespace kvpool
