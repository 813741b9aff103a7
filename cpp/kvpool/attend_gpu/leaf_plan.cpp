#include "kvpool/attend_gpu/leaf_plan.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "kvpool/attention/attend_work.h"
#include "kvpool/attention/merge_tree.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/module_driver.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kRowsMax = 8 * kGridYMax;         // of a node: merges are 8 rows a thread block
constexpr std::int64_t kSeenMax = std::int64_t{1} << 30;  // fits 32 bits, with a leaf's tokens and query tokens added
constexpr std::uint64_t kBlockTokensMax = std::uint64_t{1} << 30;
constexpr std::uint64_t kStrideUnit = 16;  // elements

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ErrorCode::kUnsupported, "attention on a GPU: " + what);
}

std::uint64_t address_of(const std::byte* block) noexcept { return reinterpret_cast<std::uintptr_t>(block); }

void check_types(const AttendCall& call) {
  const KVRows& kv = call.kv;
  require(kv.dtype != DType::kFloat8E4M3, "there is no kernel for keys and values of float8_e4m3fn");
  require(call.query_dtype == kv.dtype, std::string("queries must have the type of keys and values, ") +
                                            dtype_name(kv.dtype) + ", not " + dtype_name(call.query_dtype));
  require(kv.head_dim == 64 || kv.head_dim == 128,
          "a head must have 64 or 128 elements, not " + std::to_string(kv.head_dim));
  const std::uint64_t unit = kStrideUnit * dtype_bytes(kv.dtype);
  require(kv.head_stride % unit == 0 && kv.token_stride % unit == 0,
          "rows must be multiples of " + std::to_string(unit) + " bytes apart, not " + std::to_string(kv.head_stride) +
              " and " + std::to_string(kv.token_stride));
  require(kv.block_tokens <= kBlockTokensMax, "a block has too many tokens");
  require(kv.kv_heads <= kGridYMax, "there are too many KV heads");
}

class Planner {
 public:
  Planner(const AttendCall& call, std::uint32_t tile) : call_(call), tile_(tile) {
    LeafArguments& arguments = plan_.arguments;
    const std::size_t element = dtype_bytes(call.kv.dtype);
    arguments.head_stride = static_cast<std::int64_t>(call.kv.head_stride / element);
    arguments.token_stride = static_cast<std::int64_t>(call.kv.token_stride / element);
    arguments.block_tokens = static_cast<std::int32_t>(call.kv.block_tokens);
    arguments.group = static_cast<std::int32_t>(call.query_heads / call.kv.kv_heads);
    arguments.query_heads = static_cast<std::int32_t>(call.query_heads);
    arguments.scale_log2e = scale_log2e(call);
    plan_.kv_heads = call.kv.kv_heads;
  }

  LeafPlan plan() && {
    find_lowest();
    for (std::size_t item = 0; item < call_.items.size(); ++item) add_item(item);
    plan_.node_floats = plan_.floats;
    for (const LeafPlan::Node& node : plan_.nodes) add_leaves(node);
    for (const std::vector<MergePair>& level : levels_) {
      plan_.level_pairs.push_back(level.size());
      plan_.pairs.insert(plan_.pairs.end(), level.begin(), level.end());
    }
    require(plan_.tasks.size() <= kGridXMax, "there are too many leaves");
    return std::move(plan_);
  }

 private:
  struct Blocks {
    std::uint64_t first;  // in the item's tables
    std::uint64_t count;
  };

  Blocks blocks_of(const AttendItem& item) const noexcept {
    if (item.range.tokens() == 0) return {0, 0};
    const std::uint64_t first = (item.range.begin - item.table_begin) / call_.kv.block_tokens;
    return {first, (item.range.end - 1 - item.table_begin) / call_.kv.block_tokens - first + 1};
  }

  void find_lowest() {
    constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t k = kNone;
    std::uint64_t v = kNone;
    for (const AttendItem& item : call_.items) {
      const Blocks blocks = blocks_of(item);
      for (std::uint64_t i = blocks.first; i < blocks.first + blocks.count; ++i) {
        k = std::min(k, address_of(item.k_blocks[i]) + call_.kv.k_offset);
        v = std::min(v, address_of(item.v_blocks[i]) + call_.kv.v_offset);
      }
    }
    if (k == kNone) return;  // no item has a token
    require(k % kBlockUnit == 0 && v % kBlockUnit == 0, "keys and values must be aligned to 16 bytes");
    plan_.arguments.k = k;
    plan_.arguments.v = v;
  }

  static std::int64_t units(std::uint64_t address, std::uint64_t lowest, std::size_t item) {
    require((address - lowest) % kBlockUnit == 0,
            "keys and values of sequence " + std::to_string(item) + " are not aligned to 16 bytes");
    return static_cast<std::int64_t>((address - lowest) / kBlockUnit);
  }

  void add_item(std::size_t index) {
    const AttendItem& item = call_.items[index];
    const std::uint64_t rows = std::uint64_t{call_.query_heads} * item.query_tokens;
    require(rows <= kRowsMax, "sequence " + std::to_string(item.number) + " has too many query tokens and heads");
    plan_.rows_max = std::max(plan_.rows_max, static_cast<std::uint32_t>(rows));
    plan_.group_rows_max = std::max(plan_.group_rows_max, static_cast<std::uint32_t>(rows / call_.kv.kv_heads));
    const Blocks blocks = blocks_of(item);
    const std::size_t floats = PartialNode::floats({item.query_tokens, call_.query_heads, call_.kv.head_dim});
    add_queries(index, rows * call_.kv.head_dim);
    starts_.push_back({q_begin_, plan_.k_blocks.size(), blocks.first});
    for (std::uint64_t i = blocks.first; i < blocks.first + blocks.count; ++i) {
      plan_.k_blocks.push_back(units(address_of(item.k_blocks[i]) + call_.kv.k_offset, plan_.arguments.k, item.number));
      plan_.v_blocks.push_back(units(address_of(item.v_blocks[i]) + call_.kv.v_offset, plan_.arguments.v, item.number));
    }
    for (const TokenRange& range : maximal_nodes(item.range)) {
      plan_.nodes.push_back({index, range, plan_.floats, floats});
      plan_.floats += floats;
    }
  }

  // Pieces of one sequence follow each other, and have the same queries.
  void add_queries(std::size_t index, std::uint64_t elements) {
    const bool again = index > 0 && call_.items[index].q == call_.items[index - 1].q &&
                       call_.items[index].query_tokens == call_.items[index - 1].query_tokens;
    if (!again) {
      q_begin_ = q_elements_;
      q_elements_ += elements;
    }
    plan_.q_bytes.push_back(again ? 0 : elements * dtype_bytes(call_.query_dtype));
  }

  void add_leaves(const LeafPlan::Node& node) {
    std::vector<std::size_t> places{node.at};
    add_task(node.item, {node.range.begin, std::min(node.range.end, node.range.begin + kLeafTokens)}, node.at);
    for (std::uint64_t begin = node.range.begin + kLeafTokens; begin < node.range.end; begin += kLeafTokens) {
      places.push_back(plan_.floats);
      add_task(node.item, {begin, begin + kLeafTokens}, plan_.floats);
      plan_.floats += node.floats;
    }
    const AttendItem& item = call_.items[node.item];
    const auto rows = static_cast<std::int64_t>(std::uint64_t{call_.query_heads} * item.query_tokens);
    std::size_t level = 0;
    for (std::size_t apart = 1; apart < places.size(); apart *= 2, ++level) {
      if (level == levels_.size()) levels_.emplace_back();
      for (std::size_t i = 0; i < places.size(); i += 2 * apart) {
        levels_[level].push_back(
            {static_cast<std::int64_t>(places[i]), static_cast<std::int64_t>(places[i + apart]), rows});
      }
    }
  }

  void add_task(std::size_t index, const TokenRange& range, std::size_t at) {
    const AttendItem& item = call_.items[index];
    const Start& start = starts_[index];
    const std::uint64_t token = range.begin - item.table_begin;
    const auto first = static_cast<std::int64_t>(token % call_.kv.block_tokens);
    const std::uint64_t visible = call_.causal ? item.query_begin + 1 : kSequenceTokensMax;
    const std::int64_t seen = static_cast<std::int64_t>(visible) - static_cast<std::int64_t>(range.begin) + first;
    LeafTask task;
    task.q_at = static_cast<std::int64_t>(start.q_elements);
    task.first_block = static_cast<std::int64_t>(start.block + token / call_.kv.block_tokens - start.table_block);
    task.first_token = first;
    task.tokens = static_cast<std::int64_t>(range.tokens());
    task.skip = static_cast<std::int64_t>(range.begin % tile_);
    task.seen = std::clamp(seen, -kSeenMax, kSeenMax);
    task.out_at = static_cast<std::int64_t>(at);
    task.query_tokens = item.query_tokens;
    plan_.tasks.push_back(task);
  }

  struct Start {  // of an item
    std::uint64_t q_elements;
    std::uint64_t block;        // of this plan's tables
    std::uint64_t table_block;  // the same one, in the item's tables
  };

  const AttendCall& call_;
  const std::uint32_t tile_;
  LeafPlan plan_;
  std::vector<Start> starts_;
  std::vector<std::vector<MergePair>> levels_;
  std::uint64_t q_elements_ = 0;
  std::uint64_t q_begin_ = 0;  // of the last item
};

}  // namespace

LeafPlan plan_leaves(const AttendCall& call, std::uint32_t tile) {
  static_cast<void>(explain(call));
  check_types(call);
  return Planner(call, tile).plan();
}

}  // namespace kvpool
