#include "kvpool/sequences/attend_task.h"

#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"

namespace kvpool {

AttendTask::AttendTask(Pool& pool, AttendRequest&& request, Attender& attender)
    : pool_(pool), attender_(attender), request_(std::move(request)) {
  pool.guard();
  SequenceBlocks::check_pool(pool);
  check(pool);
  const Layout& layout = pool.layout();
  places_.emplace(layout, pool.arenas(), request_.layer);
  // The tables name the pieces themselves, whether or not an arena keeps all pieces of a block together.
  rows_ = kv_rows(layout.format, layout.block_tokens, request_.layer, /*aggregated=*/false);
  fill_tables(layout.block_tokens);
  plan_ = explain(call(), attender_.team());
}

void AttendTask::check(const Pool& pool) const {
  const Layout& layout = pool.layout();
  const std::size_t layers = layout.piece_bytes.size() / layout.format.pieces_per_layer();
  if (request_.layer < layers) return;
  throw Error(
      ErrorCode::kArgument,
      "layer is " + std::to_string(request_.layer) + ", and the blocks have " + std::to_string(layers) + " layers",
      {{"layer", request_.layer}, {"layers", static_cast<std::int64_t>(layers)}});
}

void AttendTask::fill_tables(std::uint32_t block_tokens) {
  const std::uint64_t query_bytes =
      std::uint64_t{request_.query_heads} * rows_.head_dim * dtype_bytes(request_.query_dtype);
  std::uint64_t query_begin = 0;  // of all entries' query tokens, one behind the other
  for (const AttendEntry& entry : request_.entries) query_begin += entry.query_tokens;
  if (query_begin * query_bytes != request_.q.size()) {
    throw Error(ErrorCode::kArgument,
                "q has " + std::to_string(request_.q.size()) + " bytes, and " + std::to_string(query_begin) +
                    " query tokens have " + std::to_string(query_begin * query_bytes),
                {{"query_tokens", static_cast<std::int64_t>(query_begin)}});
  }
  const std::byte* q = request_.q.data();
  for (const AttendEntry& entry : request_.entries) {
    for (const TokenRange& range : entry.ranges) add_item(entry, range, block_tokens, q);
    // So that its numbers are checked, and its part has a shape.
    if (entry.ranges.empty()) add_item(entry, {}, block_tokens, q);
    q += entry.query_tokens * query_bytes;
  }
}

// The tokens of `range` are in blocks [first, end) of the sequence.
void AttendTask::add_item(const AttendEntry& entry, const TokenRange& range, std::uint32_t block_tokens,
                          const std::byte* q) {
  AttendItem item;
  item.range = range;
  item.q = q;
  item.query_tokens = entry.query_tokens;
  item.query_begin = entry.query_begin;
  if (range.tokens() > 0) {
    const std::uint64_t first = range.begin / block_tokens;
    const std::uint64_t end = (range.end - 1) / block_tokens + 1;
    const auto addresses = entry.blocks.runs().find({first, end - first});
    if (!addresses) {
      throw Error(ErrorCode::kStaleAddress,
                  "some of the blocks with tokens [" + std::to_string(range.begin) + ", " + std::to_string(range.end) +
                      ") of the sequence are no longer there",
                  {{"begin", static_cast<std::int64_t>(range.begin)}, {"end", static_cast<std::int64_t>(range.end)}});
    }
    const std::size_t n = addresses->size();
    std::vector<const std::byte*>& table = tables_.emplace_back(2 * n);
    places_->fill(*addresses, table.data(), table.data() + n);
    item.k_blocks = {table.data(), n};
    item.v_blocks = {table.data() + n, n};
    item.table_begin = first * block_tokens;
  }
  items_.push_back(item);
}

AttendCall AttendTask::call() const noexcept {
  AttendCall call;
  call.kv = rows_;
  call.layer = request_.layer;
  call.query_heads = request_.query_heads;
  call.query_dtype = request_.query_dtype;
  call.scale = request_.scale;
  call.causal = request_.causal;
  call.items = items_;
  return call;
}

std::vector<PartialAttention> AttendTask::run(AttendStop* stop) {
  struct LetGo {
    AttendTask& task;
    ~LetGo() {
      task.request_.entries.clear();
      task.places_.reset();
    }
  };
  const Attender::Computing computing(attender_);
  const LetGo let_go{*this};
  pool_.guard();
  return merged_by_entry(attend(call(), attender_.team(), {}, stop));
}

std::vector<PartialAttention> AttendTask::merged_by_entry(std::vector<PartialAttention> parts) const {
  std::vector<PartialAttention> merged;
  merged.reserve(request_.entries.size());
  std::size_t next = 0;
  for (const AttendEntry& entry : request_.entries) {
    merged.push_back(std::move(parts[next++]));
    for (std::size_t i = 1; i < entry.ranges.size(); ++i) merged.back().merge(std::move(parts[next++]));
  }
  return merged;
}

}  // namespace kvpool
