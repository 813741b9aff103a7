#include "kvpool/sequences/attend_task.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"
#include "kvpool/sequences/sequence_blocks.h"

namespace kvpool {
namespace {

constexpr std::size_t kPeerBytesMax = std::size_t{256} << 20;

}  // namespace

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
  for (const AttendEntry& entry : request_.entries) add_entry(entry);
  make_plans();
  prepare_gpu();
}

void AttendTask::prepare_gpu() {
  if (gpu_.items.empty()) {
    if (request_.stream) static_cast<void>(pool_.order_of_content(request_.stream));  // checks it
    return;
  }
  gpu_kernels_ = attender_.gpu();
  gpu_plan_ = gpu_kernels_->plan(call(gpu_));
  const std::size_t bytes = gpu_plan_.floats * sizeof(float);
  if (for_peer_ && bytes > kPeerBytesMax) {
    throw Error(
        ErrorCode::kUnsupported,
        "a call of a peer takes " + std::to_string(bytes) + " bytes of the GPU for the results of its leaves, and " +
            std::to_string(kPeerBytesMax) + " at most: ask for fewer tokens or queries",
        {{"needed_bytes", static_cast<std::int64_t>(bytes)}, {"limit", static_cast<std::int64_t>(kPeerBytesMax)}});
  }
  if (request_.follows) order_ = pool_.order_of_content(request_.stream);
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
  const MediaSegments segments = blocks.spans == nullptr ? segments_of(arenas_) : segments_of(*blocks.spans);
  return places_.emplace_back(blocks.spans.get(), LayerPlaces(pool_.layout(), segments, request_.layer)).second;
}

AttendItem AttendTask::item_of(const AttendEntry& entry) const noexcept {
  AttendItem item;
  item.q =
      request_.q.data() + entry.query_at * request_.query_heads * rows_.head_dim * dtype_bytes(request_.query_dtype);
  item.query_tokens = entry.query_tokens;
  item.query_begin = entry.query_begin;
  item.number = entry.number;
  return item;
}

void AttendTask::add_entry(const AttendEntry& entry) {
  const std::size_t before = pieces_.size();
  for (const TokenRange& range : entry.ranges) {
    if (range.tokens() > 0) add_range(entry, range);
  }
  // So that its numbers are checked, and its part has a shape.
  if (pieces_.size() == before) {
    cpu_.items.push_back(item_of(entry));
    pieces_.push_back({false, true, false});
  }
  pieces_.back().ends_entry = true;
}

// The tokens of `range` are in blocks [first, first + count) of the sequence. A piece of it has the tokens of blocks
// [begin, end) of these.
void AttendTask::add_range(const AttendEntry& entry, const TokenRange& range) {
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
  const bool has_gpu = entry.blocks.spans == nullptr && pool_.on_device();
  const auto on_gpu = [&](std::size_t block) { return has_gpu && medium_of((*addresses)[block]) == Medium::kHbm; };
  for (std::size_t begin = 0, end = 0; begin < n; begin = end) {
    while (end < n && on_gpu(end) == on_gpu(begin)) ++end;
    AttendItem item = item_of(entry);
    item.table_begin = (blocks.first + begin) * rows_.block_tokens;
    item.range.begin = std::max(range.begin, item.table_begin);
    item.range.end = std::min<std::uint64_t>(range.end, (blocks.first + end) * rows_.block_tokens);
    item.k_blocks = {table.data() + begin, end - begin};
    item.v_blocks = {table.data() + n + begin, end - begin};
    (on_gpu(begin) ? gpu_ : cpu_).items.push_back(item);
    pieces_.push_back({on_gpu(begin), end == n, false});
  }
}

void AttendTask::make_plans() {
  const AttendPlan on_cpu = explain(call(cpu_), team_);
  kernel_ = on_cpu.kernel;
  auto cpu_item = on_cpu.items.begin();
  auto gpu_item = gpu_.items.begin();
  EntryPlan plan;
  for (const Piece& piece : pieces_) {
    if (piece.on_gpu) {
      plan.gpu_tokens += (gpu_item++)->range.tokens();
    } else {
      plan.on_cpu.way = std::max(plan.on_cpu.way, cpu_item->way);
      plan.on_cpu.head_groups = std::max(plan.on_cpu.head_groups, cpu_item->head_groups);
      plan.on_cpu.nodes += (cpu_item++)->nodes;
    }
    if (piece.ends_entry) plans_.push_back(std::exchange(plan, {}));
  }
}

// K and V of one layer, by the CPU.
std::uint64_t AttendTask::bytes_read() const noexcept {
  std::uint64_t tokens = 0;
  for (const AttendItem& item : cpu_.items) tokens += item.range.tokens();
  return tokens * kv_token_bytes(pool_.layout().format);
}

AttendCall AttendTask::call(const Side& side) const noexcept {
  AttendCall call;
  call.kv = rows_;
  call.layer = request_.layer;
  call.query_heads = request_.query_heads;
  call.query_dtype = request_.query_dtype;
  call.scale = request_.scale;
  call.causal = request_.causal;
  call.items = side.items;
  return call;
}

std::vector<PartialAttention> AttendTask::run(AttendStop* stop) {
  struct LetGo {
    AttendTask& task;
    ~LetGo() {
      task.request_.entries.clear();
      task.arenas_ = {};
      task.gpu_kernels_.reset();
      task.order_.reset();
    }
  };
  const Attender::Computing computing(attender_);
  const LetGo let_go{*this};
  pool_.guard();
  if (gpu_kernels_ == nullptr) {
    const std::int64_t begin_ns = monotonic_ns();
    compute_on_cpu(stop);
    const std::int64_t end_ns = monotonic_ns();
    if (!for_peer_) attender_.pace().record(static_cast<double>(bytes_read()), end_ns - begin_ns, end_ns);
  } else {
    compute_on_both(stop);
  }
  return merged_by_entry();
}

void AttendTask::compute_on_cpu(AttendStop* stop) { cpu_.parts = attend(call(cpu_), team_, {}, stop); }

// A pool that closes ends the wait, and says so.
void AttendTask::follow(const AttendStop* stop) const {
  const std::int64_t until_ns = std::min(request_.follows_until_ns, stop != nullptr ? stop->until_ns : INT64_MAX);
  try {
    order_->wait(until_ns, &attender_.stopping());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCancelled) throw;
    throw Error(ErrorCode::kClosed, "the pool was closed while the attention waited for the GPU's work");
  }
}

void AttendTask::compute_on_both(AttendStop* stop) {
  const bool is_ready = order_ == nullptr || order_->ended();
  if (!is_ready) compute_on_cpu(stop);
  try {
    if (!is_ready) follow(stop);
    const auto meanwhile = [&] {
      if (is_ready) compute_on_cpu(stop);
    };
    gpu_.parts = gpu_kernels_->attend(call(gpu_), gpu_plan_, meanwhile, stop);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) pool_.fail(error);
    throw;
  }
}

std::vector<PartialAttention> AttendTask::merged_by_entry() {
  std::vector<PartialAttention> merged;
  merged.reserve(request_.entries.size());
  std::optional<PartialAttention> of_range;
  bool is_first = true;  // range of its entry
  for (const Piece& piece : pieces_) {
    Side& side = piece.on_gpu ? gpu_ : cpu_;
    PartialAttention& part = side.parts[side.next++];
    if (of_range) {
      of_range->merge(std::move(part));
    } else {
      of_range = std::move(part);
    }
    if (!piece.ends_range) continue;
    of_range->join_pieces();
    if (is_first) {
      merged.push_back(*std::exchange(of_range, std::nullopt));
    } else {
      merged.back().merge(*std::exchange(of_range, std::nullopt));
    }
    is_first = piece.ends_entry;
  }
  return merged;
}

}  // namespace kvpool
