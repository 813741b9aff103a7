// The inner loop of attention: one leaf of a sequence, for a range of its KV heads, in one thread.
//
// One source for each instruction set, all from one template (leaf_kernel.h) over the vectors of that set, chosen at
// run time. Every kernel goes through the tokens in tiles that are aligned in the sequence, so that neither the block
// size nor the layout changes a bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvpool/attention/partial.h"
#include "kvpool/base/page_format.h"

namespace kvpool {

// Plain data, so that a kernel's source needs nothing that other sources use as well.
struct LeafJob {
  const std::byte* const* k_blocks;  // as in an AttendItem; offsets of the layer not yet added
  const std::byte* const* v_blocks;
  std::uint64_t table_begin;
  std::uint64_t begin;  // tokens [begin, end) of one leaf
  std::uint64_t end;
  std::uint64_t readable;  // tokens up to here are prefetched, though not read: >= end
  std::uint64_t k_offset;
  std::uint64_t v_offset;
  std::uint64_t head_stride;
  std::uint64_t token_stride;
  std::uint32_t block_tokens;
  std::uint32_t head_dim;
  std::uint32_t head_begin;  // KV heads [head_begin, head_end)
  std::uint32_t head_end;
  std::uint32_t rows;          // query rows of a KV head: query heads of its group times query tokens
  std::uint32_t query_tokens;  // row r of a group is query token r % query_tokens
  std::uint64_t visible;       // query token i sees the tokens below visible + i; without causality: all
  // Of KV head head_begin and those behind it: q [row, dim], scaled by scale * log2(e).
  const float* q;
  // The same as bfloat16, not scaled, and the factor, when the queries are bfloat16; else nullptr.
  const std::uint16_t* q_bfloat16;
  float scale_log2e;
  // The result, overwritten: acc [row, dim], max [row], sum [row].
  float* acc;
  float* max;
  float* sum;
};

struct AttentionKernel {
  KernelId id;
  // For KV of this element type; nullptr: not supported.
  void (*leaf[4])(const LeafJob& job) noexcept;  // by kv_type_index()
  bool (*runs_here)() noexcept;
};

// float32, float16, bfloat16, float8_e4m3fn: 0 to 3; others: -1.
int kv_type_index(DType dtype) noexcept;

// All kernels that this processor can run, the fastest first; the last one runs on all.
std::span<const AttentionKernel* const> attention_kernels() noexcept;

}  // namespace kvpool
