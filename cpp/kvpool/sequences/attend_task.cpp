#include "kvpool/sequences/attend_task.h"

#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"
#include "kvpool/sequences/sequence_blocks.h"

namespace kvpool {

AttendTask::AttendTask(Pool& pool, AttendRequest&& request, std::uint64_t query_tokens, Attender& attender,
                       bool for_peer)
    : pool_(pool),
      attender_(attender),
      for_peer_(for_peer),
      team_(for_peer ? attender.team_for_peers() : attender.team()),
      request_(std::move(request)) {
  pool.guard();
  SequenceBlocks::check_pool(pool);
  const Layout& layout = pool.layout();
  // The tables name the pieces themselves, whether or not an arena keeps all pieces of a block together.
  rows_ = kv_rows(layout.format, layout.block_tokens, request_.layer, /*aggregated=*/false);
  check(pool, query_tokens);
  arenas_ = pool.arenas();
  for (const AttendEntry& entry : request_.entries) {
    for (const TokenRange& range : entry.ranges) add_item(entry, range);
    // So that its numbers are checked, and its part has a shape.
    if (entry.ranges.empty()) add_item(entry, {});
  }
  plan_ = explain(call(), team_);
}

void AttendTask::check(const Pool& pool, std::uint64_t query_tokens) const {
  const Layout& layout = pool.layout();
  const std::size_t layers = layout.piece_bytes.size() / layout.format.pieces_per_layer();
  if (request_.layer >= layers) {
    throw Error(
        ErrorCode::kArgument,
        "layer is " + std::to_string(request_.layer) + ", and the blocks have " + std::to_string(layers) + " layers",
        {{"layer", request_.layer}, {"layers", static_cast<std::int64_t>(layers)}});
  }
  const std::uint64_t bytes = query_tokens * request_.query_heads * rows_.head_dim * dtype_bytes(request_.query_dtype);
  if (bytes == request_.q.size()) return;
  throw Error(ErrorCode::kArgument,
              "q has " + std::to_string(request_.q.size()) + " bytes, and " + std::to_string(query_tokens) +
                  " query tokens have " + std::to_string(bytes),
              {{"query_tokens", static_cast<std::int64_t>(query_tokens)}});
}

const LayerPlaces& AttendTask::places_of(const ReadableBlocks& blocks) {
  for (const auto& [spans, places] : places_) {
    if (spans == blocks.spans.get()) return places;
  }
  const MediaSegments segments =
      blocks.spans == nullptr ? readable_segments(arenas_) : readable_segments(*blocks.spans);
  return places_.emplace_back(blocks.spans.get(), LayerPlaces(pool_.layout(), segments, request_.layer)).second;
}

// The tokens of `range` are in blocks [first, end) of the sequence.
void AttendTask::add_item(const AttendEntry& entry, const TokenRange& range) {
  AttendItem item;
  item.range = range;
  item.q =
      request_.q.data() + entry.query_at * request_.query_heads * rows_.head_dim * dtype_bytes(request_.query_dtype);
  item.query_tokens = entry.query_tokens;
  item.query_begin = entry.query_begin;
  item.number = entry.number;
  if (range.tokens() > 0) {
    const BlockRange blocks = blocks_of(range, rows_.block_tokens);
    const auto addresses = entry.blocks.runs->find(blocks);
    if (!addresses) {
      throw Error(ErrorCode::kStaleAddress,
                  "some of the blocks with tokens [" + std::to_string(range.begin) + ", " + std::to_string(range.end) +
                      ") of the sequence are no longer there",
                  {{"begin", static_cast<std::int64_t>(range.begin)},
                   {"end", static_cast<std::int64_t>(range.end)},
                   {"position", static_cast<std::int64_t>(entry.number)}});
    }
    const std::size_t n = addresses->size();
    std::vector<const std::byte*>& table = tables_.emplace_back(2 * n);
    places_of(entry.blocks).fill(*addresses, table.data(), table.data() + n);
    item.k_blocks = {table.data(), n};
    item.v_blocks = {table.data() + n, n};
    item.table_begin = blocks.first * rows_.block_tokens;
  }
  items_.push_back(item);
}

// K and V of one layer.
std::uint64_t AttendTask::bytes_read() const noexcept {
  std::uint64_t tokens = 0;
  for (const AttendItem& item : items_) tokens += item.range.tokens();
  return tokens * kv_token_bytes(pool_.layout().format);
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
      task.arenas_ = {};
    }
  };
  const Attender::Computing computing(attender_);
  const LetGo let_go{*this};
  pool_.guard();
  const std::int64_t begin_ns = monotonic_ns();
  std::vector<PartialAttention> parts = merged_by_entry(attend(call(), team_, {}, stop));
  const std::int64_t end_ns = monotonic_ns();
  if (!for_peer_) attender_.pace().record(static_cast<double>(bytes_read()), end_ns - begin_ns, end_ns);
  return parts;
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
