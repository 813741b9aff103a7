#include "kvpool/attention/attend.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>

#include "kvpool/attention/attend_work.h"
#include "kvpool/attention/number_formats.h"
#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

std::int64_t field(std::uint64_t value) noexcept { return static_cast<std::int64_t>(value); }

// Says which layer is meant, and which item.
class Refusal {
 public:
  explicit Refusal(const AttendCall& call) : where_("attention over layer " + std::to_string(call.layer)) {}
  Refusal(const AttendCall& call, std::size_t item) : Refusal(call) {
    where_ += ", sequence " + std::to_string(call.items[item].number);
  }

  void unless(bool holds, const std::string& what, std::initializer_list<ErrorField> fields) const {
    if (!holds) throw Error(ErrorCode::kArgument, where_ + ": " + what, fields);
  }

 private:
  std::string where_;
};

void check_kv(const AttendCall& call) {
  const Refusal refuse(call);
  const KVRows& kv = call.kv;
  refuse.unless(kv_type_index(kv.dtype) >= 0,
                std::string("K and V are float32, float16, bfloat16 or float8_e4m3fn, not ") + dtype_name(kv.dtype),
                {{"dtype", static_cast<std::int64_t>(kv.dtype)}});
  refuse.unless(is_result_type(call.query_dtype),
                std::string("queries are float32, float16 or bfloat16, not ") + dtype_name(call.query_dtype),
                {{"dtype", static_cast<std::int64_t>(call.query_dtype)}});
  refuse.unless(kv.head_dim > 0 && kv.head_dim % 8 == 0 && kv.head_dim <= kHeadDimMax,
                "a head has a multiple of 8 elements, up to " + std::to_string(kHeadDimMax) + ", not " +
                    std::to_string(kv.head_dim),
                {{"head_dim", kv.head_dim}, {"maximum", kHeadDimMax}});
  refuse.unless(kv.kv_heads > 0 && call.query_heads > 0 && call.query_heads % kv.kv_heads == 0,
                std::to_string(call.query_heads) + " query heads cannot share " + std::to_string(kv.kv_heads) +
                    " KV heads evenly",
                {{"query_heads", call.query_heads}, {"kv_heads", kv.kv_heads}});
  refuse.unless(kv.block_tokens > 0, "a block has no tokens", {{"block_tokens", kv.block_tokens}});
  const std::uint64_t row = std::uint64_t{kv.head_dim} * dtype_bytes(kv.dtype);
  refuse.unless(kv.token_stride >= row || kv.block_tokens == 1, "rows of two tokens overlap",
                {{"token_stride", field(kv.token_stride)}, {"row", field(row)}});
  refuse.unless(kv.head_stride >= row || kv.kv_heads == 1, "rows of two heads overlap",
                {{"head_stride", field(kv.head_stride)}, {"row", field(row)}});
  refuse.unless(std::isfinite(scale_log2e(call)), "the scale is not a finite number, or too large", {});
}

void check_item(const AttendCall& call, std::size_t index) {
  const Refusal refuse(call, index);
  const AttendItem& item = call.items[index];
  refuse.unless(item.query_tokens > 0 && item.query_tokens <= kQueryTokensMax,
                "there can be 1 to " + std::to_string(kQueryTokensMax) + " query tokens, not " +
                    std::to_string(item.query_tokens),
                {{"query_tokens", item.query_tokens}, {"maximum", kQueryTokensMax}});
  static_cast<void>(PartialAttention({item.query_tokens, call.query_heads, call.kv.head_dim}));  // throws: too many
  refuse.unless(item.query_begin <= kSequenceTokensMax, "the queries' position is too high",
                {{"query_begin", field(item.query_begin)}, {"maximum", field(kSequenceTokensMax)}});
  refuse.unless(item.q != nullptr, "there are no queries", {});
  refuse.unless(item.k_blocks.size() == item.v_blocks.size(), "K and V have different numbers of blocks",
                {{"k_blocks", field(item.k_blocks.size())}, {"v_blocks", field(item.v_blocks.size())}});
  refuse.unless(item.range.begin <= item.range.end && item.range.end <= kSequenceTokensMax,
                "the range of tokens ends before it begins, or is too long",
                {{"begin", field(item.range.begin)}, {"end", field(item.range.end)}});
  if (item.range.begin == item.range.end) return;
  const std::uint64_t bt = call.kv.block_tokens;
  const bool in_table =
      item.range.begin >= item.table_begin && (item.range.end - item.table_begin - 1) / bt < item.k_blocks.size();
  refuse.unless(in_table, "the blocks do not have all tokens of the range",
                {{"begin", field(item.range.begin)},
                 {"end", field(item.range.end)},
                 {"table_begin", field(item.table_begin)},
                 {"table_tokens", field(item.k_blocks.size() * bt)}});
  const std::uint64_t last = (item.range.end - item.table_begin - 1) / bt;
  for (std::uint64_t block = (item.range.begin - item.table_begin) / bt; block <= last; ++block) {
    if (item.k_blocks[block] != nullptr && item.v_blocks[block] != nullptr) continue;
    refuse.unless(false, "block " + std::to_string(block) + " has no memory", {{"block", field(block)}});
  }
}

const AttentionKernel& checked(const AttendCall& call, const AttendSettings& settings) {
  check_kv(call);
  for (std::size_t i = 0; i < call.items.size(); ++i) check_item(call, i);
  const std::span<const AttentionKernel* const> kernels = attention_kernels();
  if (settings.kernel == nullptr) return *kernels.front();
  if (std::find(kernels.begin(), kernels.end(), settings.kernel) != kernels.end()) return *settings.kernel;
  throw Error(ErrorCode::kUnsupported, "this processor cannot run the kernel " + kernel_name(settings.kernel->id));
}

}  // namespace

KVRows kv_rows(const PageFormat& format, std::uint32_t block_tokens, std::uint32_t layer, bool aggregated) noexcept {
  const std::uint64_t row = format.row_bytes();
  const std::uint64_t half = std::uint64_t{format.head_dim} * dtype_bytes(format.dtype);
  const std::uint64_t piece = row * format.kv_heads * block_tokens;
  KVRows rows;
  rows.dtype = format.dtype;
  rows.kv_heads = format.kv_heads;
  rows.head_dim = format.head_dim;
  rows.block_tokens = block_tokens;
  rows.head_stride = format.tokens_first ? row : row * block_tokens;
  rows.token_stride = format.tokens_first ? row * format.kv_heads : row;
  rows.k_offset = aggregated ? piece * format.pieces_per_layer() * layer : 0;
  rows.v_offset = rows.k_offset + (format.fused ? half : aggregated ? piece : 0);
  return rows;
}

void AttendStop::check() const {
  if (is_asked()) throw Error(ErrorCode::kCancelled, "the attention was cancelled");
  if (monotonic_ns() < until_ns) return;
  throw Error(ErrorCode::kDeadline, "the attention was not computed by its deadline");
}

std::vector<PartialAttention> attend(const AttendCall& call, const AttendTeam& team, const AttendSettings& settings,
                                     AttendStop* stop) {
  AttendWork work(call, checked(call, settings), team, settings);
  work.prepare();
  if (!work.run(stop)) {
    stop->check();
  }
  std::vector<std::vector<PartialNode>> nodes = work.take_nodes();
  std::vector<PartialAttention> parts;
  parts.reserve(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const PartialShape shape{call.items[i].query_tokens, call.query_heads, call.kv.head_dim};
    parts.emplace_back(shape, std::move(nodes[i]));
  }
  return parts;
}

AttendPlan explain(const AttendCall& call, const AttendTeam& team, const AttendSettings& settings) {
  return AttendWork(call, checked(call, settings), team, settings).plan();
}

}  // namespace kvpool
