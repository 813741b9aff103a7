// Attention over blocks of one pool, checked and ready to be computed in any thread.
//
// Each range of tokens is cut where the memory changes: what lies on the pool's GPU its kernels compute, the CPU the
// rest. Both do at the same time if the work that the GPU's part has to follow has ended; otherwise the CPU goes first.
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

#include "kvpool/attend_gpu/gpu_attention.h"
#include "kvpool/attention/attend.h"
#include "kvpool/cuda/order.h"
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
  // Blocks on a GPU are read when the work of this stream has ended, or without a stream that of all; false: they have
  // their content.
  bool follows = false;
  CallerStream stream = std::nullopt;
  std::int64_t follows_until_ns = INT64_MAX;  // how long that is waited for (CLOCK_MONOTONIC)
};

// Of K and V of one token of a layer.
inline std::uint64_t kv_token_bytes(const PageFormat& format) noexcept {
  return std::uint64_t{2} * format.kv_heads * format.head_dim * dtype_bytes(format.dtype);
}

class AttendTask {
 public:
  // Throws kArgument for numbers that do not fit the pool or each other, and for a stream of another device;
  // kStaleAddress for tokens in blocks that are not there (begin, end); kUnsupported as LayerPlaces and plan_leaves(),
  // and for a peer's call that takes too much of the GPU's memory. `q` must have `query_tokens` tokens.
  AttendTask(Pool& pool, AttendRequest&& request, std::uint64_t query_tokens, Attender& attender,
             bool for_peer = false);
  AttendTask(const AttendTask&) = delete;
  AttendTask& operator=(const AttendTask&) = delete;

  // How an entry is carried out.
  struct EntryPlan {
    AttendPlan::Item on_cpu;
    std::uint64_t gpu_tokens = 0;  // that the GPU attends to
  };
  KernelId kernel() const noexcept { return kernel_; }  // of the CPU
  int threads() const noexcept { return team_.threads; }
  const std::vector<EntryPlan>& plans() const noexcept { return plans_; }
  std::span<const std::byte> queries() const noexcept { return request_.q; }
  // What the GPU's part has to follow; null: nothing.
  const std::shared_ptr<const DeviceOrder>& order() const noexcept { return order_; }
  // Computes the part of each entry, and lets the blocks go, also when it throws. The nodes of a part are those of its
  // ranges (maximal_nodes), however they were cut. Throws kClosed when the pool is closed, kOutOfMemory; kDeadline when
  // the work to follow has not ended in time, and as DeviceOrder::wait; kDeviceLost, and then the pool fails;
  // kCancelled and kDeadline as `stop` says. Called once.
  std::vector<PartialAttention> run(AttendStop* stop = nullptr);

 private:
  void check(const Pool& pool, std::uint64_t query_tokens) const;
  const LayerPlaces& places_of(const ReadableBlocks& blocks);
  // Items that one kind of memory holds, and what they make.
  struct Side {
    std::vector<AttendItem> items;
    std::vector<PartialAttention> parts;
    std::size_t next = 0;  // of `parts`, to be merged
  };
  // A range of an entry: so many items, each on one side.
  struct Piece {
    bool on_gpu;
    bool ends_range;  // it is the last of its range
    bool ends_entry;
  };
  AttendItem item_of(const AttendEntry& entry) const noexcept;
  void add_entry(const AttendEntry& entry);
  void add_range(const AttendEntry& entry, const TokenRange& range);
  void make_plans();
  std::uint64_t bytes_read() const noexcept;
  AttendCall call(const Side& side) const noexcept;
  void compute_on_cpu(AttendStop* stop);
  void prepare_gpu();
  void follow(const AttendStop* stop) const;
  void compute_on_both(AttendStop* stop);
  std::vector<PartialAttention> merged_by_entry();

  Pool& pool_;
  Attender& attender_;
  const bool for_peer_;
  const AttendTeam team_;
  AttendRequest request_;
  std::vector<std::pair<const MediaSpans*, LayerPlaces>> places_;  // of each memory that entries lie in
  MediumMap<std::shared_ptr<Arena>> arenas_;                       // kept until it was computed
  std::vector<std::vector<const std::byte*>> tables_;              // K, then V, of each item
  Side cpu_;
  Side gpu_;
  std::vector<Piece> pieces_;  // in the order of the entries and their ranges
  KVRows rows_;
  KernelId kernel_;
  std::vector<EntryPlan> plans_;
  std::shared_ptr<GpuAttention> gpu_kernels_;  // null: nothing is on the GPU
  LeafPlan gpu_plan_;
  std::shared_ptr<const DeviceOrder> order_;
};

}  // namespace kvpool
