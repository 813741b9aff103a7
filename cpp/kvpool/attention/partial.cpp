#include "kvpool/attention/partial.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "kvpool/attention/merge_rows.h"
#include "kvpool/attention/merge_tree.h"
#include "kvpool/attention/number_formats.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::uint32_t kNumberMax = 1U << 20;                       // of each number of a shape
constexpr std::uint64_t kValuesMax = std::uint64_t{1} << 32;         // of all of them together
constexpr float kNothing = -std::numeric_limits<float>::infinity();  // lse and max of a row without tokens
constexpr double kLn2 = 0.69314718055994530942;

std::int64_t field(std::uint64_t value) noexcept { return static_cast<std::int64_t>(value); }

std::string described(const PartialShape& shape) {
  return std::to_string(shape.tokens) + " query tokens x " + std::to_string(shape.heads) + " heads x " +
         std::to_string(shape.head_dim);
}

void check_shape(const PartialShape& shape) {
  for (const std::uint32_t number : {shape.tokens, shape.heads, shape.head_dim}) {
    if (number > 0 && number <= kNumberMax) continue;
    throw Error(ErrorCode::kArgument, "a partial result cannot have " + described(shape),
                {{"value", number}, {"maximum", kNumberMax}});
  }
  if (std::uint64_t{shape.rows()} * shape.head_dim <= kValuesMax) return;
  throw Error(ErrorCode::kArgument, "a partial result cannot have " + described(shape),
              {{"value", field(shape.values())}, {"maximum", field(kValuesMax)}});
}

void check_size(const char* what, std::size_t given, std::size_t needed) {
  if (given == needed) return;
  throw Error(ErrorCode::kArgument,
              std::string(what) + " has the size " + std::to_string(given) + "; it must be " + std::to_string(needed),
              {{"given", field(given)}, {"needed", field(needed)}});
}

void check_result_type(DType dtype) {
  if (is_result_type(dtype)) return;
  throw Error(ErrorCode::kArgument, std::string("a result is float32, float16 or bfloat16, not ") + dtype_name(dtype),
              {{"dtype", static_cast<std::int64_t>(dtype)}});
}

bool is_piece(const TokenRange& range) noexcept {
  return range.begin < range.end && leaf_of(range.begin) == leaf_of(range.end - 1) && !is_tree_node(range);
}

void check_node(const PartialNode& node, const PartialShape& shape) {
  if (node.range.end > kSequenceTokensMax || (!is_tree_node(node.range) && !is_piece(node.range))) {
    throw Error(ErrorCode::kArgument, "a node covers neither aligned leaves nor tokens of one leaf",
                {{"begin", field(node.range.begin)}, {"end", field(node.range.end)}});
  }
  check_size("a node", node.values.size(), PartialNode::floats(shape));
}

TokenSet ranges_of(const std::vector<PartialNode>& nodes) {
  std::vector<TokenRange> ranges;
  ranges.reserve(nodes.size());
  for (const PartialNode& node : nodes) ranges.push_back(node.range);
  return TokenSet(ranges);
}

RowsView view(std::vector<float>& values, const PartialShape& shape) noexcept {
  float* acc = values.data();
  return {acc, acc + shape.values(), acc + shape.values() + shape.rows()};
}

ConstRowsView view(const std::vector<float>& values, const PartialShape& shape) noexcept {
  const float* acc = values.data();
  return {acc, acc + shape.values(), acc + shape.values() + shape.rows()};
}

void merge_values(std::vector<float>& into, const std::vector<float>& from, const PartialShape& shape) noexcept {
  merge_rows(view(into, shape), view(from, shape), shape.rows(), shape.head_dim);
}

// `node` and then `next`, whose tokens follow.
void absorb(PartialNode& node, const PartialNode& next, const PartialShape& shape) noexcept {
  merge_values(node.values, next.values, shape);
  node.exact = node.exact && next.exact && node.kernel == next.kernel;
  if (node.kernel != next.kernel) node.kernel.reset();
  node.range.end = next.range.end;
}

// The pieces at the end of nodes[0, count) that make up a whole leaf become that leaf, merged from left to right.
// Returns how many nodes there are then.
std::size_t close_leaf(std::vector<PartialNode>& nodes, std::size_t count, const PartialShape& shape) noexcept {
  if (!is_piece(nodes[count - 1].range) || nodes[count - 1].range.end % kLeafTokens != 0) return count;
  std::size_t first = count - 1;
  while (first > 0 && is_piece(nodes[first - 1].range) && nodes[first - 1].range.end == nodes[first].range.begin &&
         nodes[first].range.begin % kLeafTokens != 0) {
    --first;
  }
  if (nodes[first].range.begin % kLeafTokens != 0) return count;
  for (std::size_t i = first + 1; i < count; ++i) absorb(nodes[first], nodes[i], shape);
  nodes[first].exact = false;
  return first + 1;
}

// Where a row is in an array that is ordered this way; rows of a part are heads-first.
std::size_t place_of(std::size_t head, std::size_t token, const PartialShape& shape, RowOrder order) noexcept {
  return order == RowOrder::kHeadsFirst ? head * shape.tokens + token : token * shape.heads + head;
}

float to_base_two(float lse, LseBase base) noexcept {
  return base == LseBase::kTwo ? lse : static_cast<float>(static_cast<double>(lse) / kLn2);
}

}  // namespace

std::string kernel_name(const KernelId& kernel) {
  static constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512bf16", "sm80", "sm90", "sm100"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(kAttentionIsaMax) + 1);
  return std::string(kNames[static_cast<std::size_t>(kernel.isa)]) + "/" + std::to_string(kernel.version);
}

PartialAttention::PartialAttention(const PartialShape& shape) : shape_(shape) { check_shape(shape); }

PartialAttention::PartialAttention(const PartialShape& shape, std::vector<PartialNode> nodes)
    : PartialAttention(shape) {
  for (const PartialNode& node : nodes) check_node(node, shape);
  std::sort(nodes.begin(), nodes.end(),
            [](const PartialNode& a, const PartialNode& b) { return a.range.begin < b.range.begin; });
  covers_ = ranges_of(nodes);
  nodes_ = std::move(nodes);
  join_siblings();
}

PartialAttention PartialAttention::from_lse(const PartialShape& shape, std::span<const std::byte> out, DType dtype,
                                            std::span<const float> lse, LseBase base, RowOrder order,
                                            std::span<const TokenRange> covers) {
  PartialAttention part(shape);
  check_result_type(dtype);
  check_size("the output", out.size(), shape.values() * dtype_bytes(dtype));
  check_size("lse", lse.size(), shape.rows());
  Foreign foreign{TokenSet(covers), std::vector<float>(PartialNode::floats(shape))};
  if (foreign.covers.empty()) throw Error(ErrorCode::kArgument, "a result must say which tokens it covers");
  const RowsView rows = view(foreign.values, shape);
  for (std::size_t head = 0; head < shape.heads; ++head) {
    for (std::size_t token = 0; token < shape.tokens; ++token) {
      const std::size_t row = head * shape.tokens + token;
      const float given = lse[place_of(head, token, shape, order)];
      const bool seen = given != kNothing;
      const float max = seen ? to_base_two(given, base) : kNothing;
      if (std::isnan(max) || (std::isinf(max) && seen)) {
        throw Error(ErrorCode::kArgument,
                    "lse of head " + std::to_string(head) + ", query token " + std::to_string(token) + " is " +
                        std::to_string(given) + "; a row that saw no token has -inf",
                    {{"head", field(head)}, {"token", field(token)}});
      }
      rows.max[row] = max;
      rows.sum[row] = seen ? 1.0F : 0.0F;
      const std::size_t from = place_of(head, token, shape, RowOrder::kTokensFirst) * shape.head_dim;
      if (seen) to_floats(dtype, &out[from * dtype_bytes(dtype)], shape.head_dim, rows.acc + row * shape.head_dim);
    }
  }
  part.covers_ = foreign.covers;
  part.foreign_.push_back(std::move(foreign));
  return part;
}

bool PartialAttention::exact() const noexcept {
  const auto canonical = [this](const PartialNode& node) {
    return node.exact && node.kernel == nodes_.front().kernel &&
           (is_tree_node(node.range) || node.range.begin % kLeafTokens == 0);
  };
  return foreign_.empty() && std::all_of(nodes_.begin(), nodes_.end(), canonical);
}

std::optional<KernelId> PartialAttention::kernel() const noexcept {
  if (nodes_.empty() || !foreign_.empty()) return std::nullopt;
  const std::optional<KernelId> first = nodes_.front().kernel;
  for (const PartialNode& node : nodes_) {
    if (node.kernel != first) return std::nullopt;
  }
  return first;
}

void PartialAttention::merge(PartialAttention part) {
  if (!(part.shape_ == shape_)) {
    throw Error(ErrorCode::kArgument,
                "a part of " + described(part.shape_) + " cannot be merged with one of " + described(shape_),
                {{"tokens", part.shape_.tokens}, {"heads", part.shape_.heads}, {"head_dim", part.shape_.head_dim}});
  }
  TokenSet covers = covers_.joined(part.covers_);
  std::vector<PartialNode> nodes;
  nodes.reserve(nodes_.size() + part.nodes_.size());
  std::vector<Foreign> foreign;
  foreign.reserve(foreign_.size() + part.foreign_.size());
  // Nothing throws from here on.
  std::merge(std::make_move_iterator(nodes_.begin()), std::make_move_iterator(nodes_.end()),
             std::make_move_iterator(part.nodes_.begin()), std::make_move_iterator(part.nodes_.end()),
             std::back_inserter(nodes),
             [](const PartialNode& a, const PartialNode& b) { return a.range.begin < b.range.begin; });
  std::merge(std::make_move_iterator(foreign_.begin()), std::make_move_iterator(foreign_.end()),
             std::make_move_iterator(part.foreign_.begin()), std::make_move_iterator(part.foreign_.end()),
             std::back_inserter(foreign), [](const Foreign& a, const Foreign& b) {
               return a.covers.ranges().front().begin < b.covers.ranges().front().begin;
             });
  covers_ = std::move(covers);
  nodes_ = std::move(nodes);
  foreign_ = std::move(foreign);
  join_siblings();
}

void PartialAttention::join_siblings() noexcept {
  std::size_t count = 0;  // of nodes that are done, at the front
  for (std::size_t next = 0; next < nodes_.size(); ++next) {
    if (next != count) nodes_[count] = std::move(nodes_[next]);
    count = close_leaf(nodes_, count + 1, shape_);
    while (count >= 2 && is_tree_node(nodes_[count - 1].range) && is_tree_node(nodes_[count - 2].range) &&
           are_siblings(nodes_[count - 2].range, nodes_[count - 1].range)) {
      absorb(nodes_[count - 2], nodes_[count - 1], shape_);
      --count;
    }
  }
  nodes_.erase(nodes_.begin() + static_cast<std::ptrdiff_t>(count), nodes_.end());
}

void PartialAttention::join_pieces() noexcept {
  std::size_t count = 0;  // of nodes that are done, at the front
  for (std::size_t next = 0; next < nodes_.size(); ++next) {
    const TokenRange& range = nodes_[next].range;
    if (count > 0 && nodes_[count - 1].range.end == range.begin && is_piece(nodes_[count - 1].range) &&
        is_piece(range) && leaf_of(nodes_[count - 1].range.begin) == leaf_of(range.begin)) {
      absorb(nodes_[count - 1], nodes_[next], shape_);
      nodes_[count - 1].exact = false;
      continue;
    }
    if (next != count) nodes_[count] = std::move(nodes_[next]);
    ++count;
  }
  nodes_.erase(nodes_.begin() + static_cast<std::ptrdiff_t>(count), nodes_.end());
}

std::vector<float> PartialAttention::folded() const {
  std::vector<float> all;
  std::size_t end = nodes_.size();
  while (end > 0) {  // from the right, pieces of one leaf together
    std::size_t first = end - 1;
    while (first > 0 && leaf_of(nodes_[first - 1].range.begin) == leaf_of(nodes_[first].range.begin)) --first;
    std::vector<float> leaf = nodes_[first].values;
    for (std::size_t i = first + 1; i < end; ++i) merge_values(leaf, nodes_[i].values, shape_);
    if (!all.empty()) merge_values(leaf, all, shape_);
    all = std::move(leaf);
    end = first;
  }
  for (const Foreign& foreign : foreign_) {
    if (all.empty()) {
      all = foreign.values;
    } else {
      merge_values(all, foreign.values, shape_);
    }
  }
  return all;
}

void PartialAttention::check_covers(std::uint64_t tokens) const {
  if (const std::optional<TokenRange> gap = covers_.first_gap(tokens)) {
    throw Error(ErrorCode::kState,
                "the result lacks the tokens [" + std::to_string(gap->begin) + ", " + std::to_string(gap->end) +
                    ") of " + std::to_string(tokens),
                {{"begin", field(gap->begin)}, {"end", field(gap->end)}, {"tokens", field(tokens)}});
  }
  if (covers_.end() > tokens) {
    throw Error(ErrorCode::kState,
                "the result covers tokens up to " + std::to_string(covers_.end()) + ", behind the sequence of " +
                    std::to_string(tokens),
                {{"covered", field(covers_.end())}, {"tokens", field(tokens)}});
  }
}

void PartialAttention::finish(DType dtype, std::uint64_t tokens, std::span<std::byte> out) const {
  check_result_type(dtype);
  check_size("the memory for the result", out.size(), shape_.values() * dtype_bytes(dtype));
  check_covers(tokens);
  std::vector<float> all = folded();
  if (all.empty()) all.resize(PartialNode::floats(shape_));  // no tokens: every sum is 0
  const RowsView rows = view(all, shape_);
  for (std::size_t head = 0; head < shape_.heads; ++head) {
    for (std::size_t token = 0; token < shape_.tokens; ++token) {
      const std::size_t row = head * shape_.tokens + token;
      float* acc = rows.acc + row * shape_.head_dim;
      const float sum = rows.sum[row];
      for (std::size_t d = 0; d < shape_.head_dim; ++d) acc[d] = sum == 0.0F ? 0.0F : acc[d] / sum;
      const std::size_t to = place_of(head, token, shape_, RowOrder::kTokensFirst) * shape_.head_dim;
      from_floats(dtype, acc, shape_.head_dim, &out[to * dtype_bytes(dtype)]);
    }
  }
}

void PartialAttention::lse(LseBase base, RowOrder order, std::span<float> out) const {
  check_size("the memory for lse", out.size(), shape_.rows());
  const std::vector<float> all = folded();
  for (std::size_t head = 0; head < shape_.heads; ++head) {
    for (std::size_t token = 0; token < shape_.tokens; ++token) {
      const std::size_t row = head * shape_.tokens + token;
      float& lse = out[place_of(head, token, shape_, order)];
      lse = kNothing;
      if (all.empty()) continue;
      const ConstRowsView rows = view(all, shape_);
      if (rows.sum[row] == 0.0F) continue;
      const double two = static_cast<double>(rows.max[row]) + std::log2(static_cast<double>(rows.sum[row]));
      lse = static_cast<float>(base == LseBase::kTwo ? two : two * kLn2);
    }
  }
}

PartialAttention merged(std::span<const PartialAttention> parts) {
  if (parts.empty())
    throw Error(ErrorCode::kArgument, "there is nothing to merge: a part says how many rows there are");
  PartialAttention all = parts.front();
  for (const PartialAttention& part : parts.subspan(1)) all.merge(part);
  return all;
}

}  // namespace kvpool
