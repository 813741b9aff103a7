// Attention of a batch of sequences over KV that lies in blocks, on the CPU, where the blocks are.
//
// For decoding: up to 16 query tokens a sequence. Longer chunks of a prompt are better computed by the engine's own
// kernel and joined by PartialAttention::from_lse. K and V are read once for all query heads that share them.
//
// A call computes for each sequence the part over one range of its tokens. The part of a range that begins and ends at
// leaf bounds (or at the end of the sequence) has the same bits for every number of threads, every way, every layout
// and block size, and merges with the parts of other ranges into the same bits as if one call had computed all of it.
//
// Three ways to share the work between threads, chosen by the length of the range, differ in speed alone:
//
//   kHeads             the heads of one sequence are shared out; a thread reads a head's tokens from first to last.
//                      Where the batch has fewer heads than there are threads, kLeaves is taken instead
//   kLeaves            the tokens are shared out as well, at nodes of the merge tree; the caller merges
//   kLeavesAndMerges   the same, and the merges are shared out by heads
//
// Thread-safe: a call keeps everything that it changes to itself. It allocates before it computes and not while it
// does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/attention/kernel.h"
#include "kvpool/attention/partial.h"
#include "kvpool/base/copy.h"
#include "kvpool/base/page_format.h"

namespace kvpool {

inline constexpr std::uint32_t kQueryTokensMax = 16;
inline constexpr std::uint32_t kHeadDimMax = 256;  // a multiple of 8

// Where K and V of one layer lie in a block: element d of head h and token t (of the block) of K is at
// k_block + k_offset + h * head_stride + t * token_stride + d * dtype_bytes(dtype), and of V likewise. The elements of
// a row follow each other; nothing is asked of alignment beyond that of an element.
struct KVRows {
  DType dtype = DType::kNone;  // float32, float16, bfloat16 or float8_e4m3fn
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t block_tokens = 0;
  std::uint64_t k_offset = 0;  // bytes
  std::uint64_t v_offset = 0;
  std::uint64_t head_stride = 0;
  std::uint64_t token_stride = 0;

  bool operator==(const KVRows&) const = default;
};

// Of layer `layer` in blocks of this format. Aggregated blocks have all layers, so the offsets say where the layer is,
// and the tables name the block. In discrete ones every piece has a separate segment: the tables name the block's
// place in the segments of the layer's K and V, and the offsets are zero (of V, half a row where K and V are fused).
// REQUIRES: format.known().
KVRows kv_rows(const PageFormat& format, std::uint32_t block_tokens, std::uint32_t layer, bool aggregated) noexcept;

// One sequence of a batch. All that it points to must stay, unchanged, until the call returns.
struct AttendItem {
  // Block i holds the tokens from table_begin + i * block_tokens on. K and V have a table each, which may be the same.
  std::span<const std::byte* const> k_blocks;
  std::span<const std::byte* const> v_blocks;
  std::uint64_t table_begin = 0;  // position of the first token of the first block
  TokenRange range;               // of these tokens; no others are read. May be empty: the part is, too.
  const std::byte* q = nullptr;   // [query token, query head, head_dim]
  std::uint32_t query_tokens = 1;
  std::uint64_t query_begin = 0;  // position of the first query token; with `causal` it sees the tokens up to its own
  std::size_t number = 0;         // of the sequence, for messages
};

enum class AttendWay : std::uint8_t { kHeads, kLeaves, kLeavesAndMerges };

// How work is shared out. The defaults are the ranges of context of DistAttention.
struct AttendSettings {
  std::uint64_t heads_tokens_max = 8192;    // ranges up to this: kHeads
  std::uint64_t leaves_tokens_max = 32768;  // above that, up to this: kLeaves
  const AttentionKernel* kernel = nullptr;  // nullptr: the fastest of this processor
};

// What is the same for the whole batch.
struct AttendCall {
  KVRows kv;
  std::uint32_t layer = 0;  // for messages
  std::uint32_t query_heads = 0;
  DType query_dtype = DType::kNone;  // float32, float16 or bfloat16
  std::optional<float> scale;        // nullopt: 1 / sqrt(head_dim)
  bool causal = true;
  std::span<const AttendItem> items;
};

// How a call is carried out.
struct AttendPlan {
  KernelId kernel;
  int threads = 1;
  struct Item {
    AttendWay way = AttendWay::kHeads;
    std::uint32_t head_groups = 0;  // into how many ranges its KV heads are divided
    std::uint32_t nodes = 0;        // into how many ranges its tokens are
  };
  std::vector<Item> items;
};

// The threads of a call: the caller's and up to threads - 1 that the team lends. REQUIRES: the team outlives the call.
struct AttendTeam {
  CopyTeam* team = nullptr;  // nullptr: the caller alone
  int threads = 1;
};

// Ends a call early: other threads may set `asked`, and its threads look at both before each leaf.
struct AttendStop {
  std::atomic<bool> asked{false};
  const std::atomic<bool>* also_asked = nullptr;
  std::int64_t until_ns = INT64_MAX;  // CLOCK_MONOTONIC

  // Throws kCancelled, kDeadline.
  void check() const;
  bool is_asked() const noexcept {
    return asked.load(std::memory_order_relaxed) ||
           (also_asked != nullptr && also_asked->load(std::memory_order_relaxed));
  }
};

// The part of each item, in their order. Throws, before anything is computed, kArgument when numbers do not fit each
// other (the message names the layer, the item and what is wrong; fields have the numbers) and kUnsupported when the
// settings name a kernel that this processor cannot run. Throws kCancelled and kDeadline as `stop` says.
std::vector<PartialAttention> attend(const AttendCall& call, const AttendTeam& team = {},
                                     const AttendSettings& settings = {}, AttendStop* stop = nullptr);

// What attend() would do: the same checks, and the plan.
AttendPlan explain(const AttendCall& call, const AttendTeam& team = {}, const AttendSettings& settings = {});

}  // namespace kvpool
