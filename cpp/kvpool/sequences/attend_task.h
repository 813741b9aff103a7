// Attention over blocks of one pool, checked and ready to be computed in any thread.
//
// Thread-safety: one thread at a time. Its holder keeps the pool and the Attender.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/attention/attend.h"
#include "kvpool/sequences/layer_places.h"
#include "kvpool/sequences/readable_blocks.h"

namespace kvpool {

class Attender;
class Pool;

// Some tokens of one sequence.
struct AttendEntry {
  ReadableBlocks blocks;
  std::vector<TokenRange> ranges;  // disjoint
  std::uint64_t query_at = 0;      // of its first query token in the request's q
  std::uint32_t query_tokens = 1;
  std::uint64_t query_begin = 0;  // position of the first query token; with `causal` it sees the tokens up to its own
  std::size_t number = 0;         // of the sequence, for messages
};

struct AttendRequest {
  std::uint32_t layer = 0;
  std::uint32_t query_heads = 0;
  DType query_dtype = DType::kNone;
  std::optional<float> scale;  // nullopt: 1 / sqrt(head_dim)
  bool causal = true;
  std::vector<AttendEntry> entries;
  std::vector<std::byte> q;  // [query token, query head, head_dim]; entries may share query tokens
};

// Of K and V of one token of a layer.
inline std::uint64_t kv_token_bytes(const PageFormat& format) noexcept {
  return std::uint64_t{2} * format.kv_heads * format.head_dim * dtype_bytes(format.dtype);
}

class AttendTask {
 public:
  // Throws kArgument for numbers that do not fit the pool or each other, kStaleAddress for tokens in blocks that are
  // not there (begin, end), kUnsupported as LayerPlaces. `q` must have `query_tokens` tokens.
  AttendTask(Pool& pool, AttendRequest&& request, std::uint64_t query_tokens, Attender& attender,
             bool for_peer = false);
  AttendTask(const AttendTask&) = delete;
  AttendTask& operator=(const AttendTask&) = delete;

  const AttendPlan& plan() const noexcept { return plan_; }  // an item for each range; for an entry without, one
  std::span<const std::byte> queries() const noexcept { return request_.q; }
  // Computes the part of each entry, and lets the blocks go, also when it throws. Throws kClosed when the pool is
  // closed, kOutOfMemory; kCancelled and kDeadline as `stop` says. Called once.
  std::vector<PartialAttention> run(AttendStop* stop = nullptr);

 private:
  void check(const Pool& pool, std::uint64_t query_tokens) const;
  const LayerPlaces& places_of(const ReadableBlocks& blocks);
  void add_item(const AttendEntry& entry, const TokenRange& range);
  std::uint64_t bytes_read() const noexcept;
  AttendCall call() const noexcept;
  std::vector<PartialAttention> merged_by_entry(std::vector<PartialAttention> parts) const;

  Pool& pool_;
  Attender& attender_;
  const bool for_peer_;
  const AttendTeam team_;
  AttendRequest request_;
  std::vector<std::pair<const MediaSpans*, LayerPlaces>> places_;  // of each memory that entries lie in
  MediumMap<std::shared_ptr<Arena>> arenas_;                       // kept until it was computed
  std::vector<std::vector<const std::byte*>> tables_;              // K, then V, of each item
  std::vector<AttendItem> items_;                                  // one for each range of each entry
  KVRows rows_;
  AttendPlan plan_;
};

}  // namespace kvpool
