#include "kvpool/blocks/parallel.h"

#include <algorithm>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

void check_number(const char* name, std::uint64_t value, std::uint64_t maximum) {
  if (value >= 1 && value <= maximum) return;
  throw Error(ErrorCode::kArgument,
              std::string(name) + " is " + std::to_string(value) + "; it must be from 1 to " + std::to_string(maximum),
              {{"value", static_cast<std::int64_t>(value)}, {"maximum", static_cast<std::int64_t>(maximum)}});
}

// After this no product of the shape's numbers overflows 64 bits.
void check_shape(const KVShape& shape) {
  check_number("layers", shape.layers, kShapeNumberMax);
  check_number("kv_heads", shape.kv_heads, kShapeNumberMax);
  check_number("head_dim", shape.head_dim, kShapeNumberMax);
  if (dtype_bytes(shape.dtype) == 0) throw Error(ErrorCode::kArgument, "a shape needs an element type");
  check_number("block_tokens", shape.block_tokens, kShapeNumberMax);
  std::uint64_t room = kShapeBytesMax / 2;  // K and V
  for (const std::uint64_t factor :
       {shape.layers, shape.kv_heads, shape.head_dim, dtype_bytes(shape.dtype), shape.block_tokens}) {
    room /= factor;
  }
  if (room == 0) {
    throw Error(ErrorCode::kArgument,
                "a block of " + std::to_string(shape.layers) + " layers, " + std::to_string(shape.kv_heads) +
                    " KV heads of " + std::to_string(shape.head_dim) + " x " +
                    std::to_string(dtype_bytes(shape.dtype)) + " bytes and " + std::to_string(shape.block_tokens) +
                    " tokens has more than " + std::to_string(kShapeBytesMax) + " bytes",
                {{"maximum", static_cast<std::int64_t>(kShapeBytesMax)}});
  }
}

void check_heads(std::uint32_t heads, std::uint32_t tp) {
  if (heads % tp == 0 || tp % heads == 0) return;
  throw Error(ErrorCode::kArgument,
              std::to_string(heads) + " KV heads cannot be shared by " + std::to_string(tp) +
                  " tensor-parallel ranks: one number must divide the other",
              {{"kv_heads", heads}, {"tp", tp}});
}

std::vector<std::uint32_t> stage_layers_of(const KVShape& shape, const Parallel& parallel) {
  if (parallel.stage_layers.empty()) return split_layers(shape.layers, parallel.pp, parallel.split);
  const std::vector<std::uint32_t>& given = parallel.stage_layers;
  if (given.size() != parallel.pp) {
    throw Error(ErrorCode::kArgument,
                "the layers of " + std::to_string(given.size()) + " stages are given, and there are " +
                    std::to_string(parallel.pp) + " stages",
                {{"given", static_cast<std::int64_t>(given.size())}, {"needed", parallel.pp}});
  }
  std::uint64_t sum = 0;
  for (const std::uint32_t layers : given) sum += layers;
  if (sum != shape.layers) {
    throw Error(ErrorCode::kArgument,
                "the stages have " + std::to_string(sum) + " layers together, and the model has " +
                    std::to_string(shape.layers),
                {{"given", static_cast<std::int64_t>(sum)}, {"needed", shape.layers}});
  }
  return given;
}

}  // namespace

std::vector<std::uint32_t> split_layers(std::uint32_t layers, std::uint32_t stages, LayerSplit rule) {
  KVPOOL_CHECK(stages > 0);
  std::vector<std::uint32_t> result(stages, layers / stages);
  const std::uint32_t left = layers % stages;
  // vLLM spares the last stage, which also has the head of the model.
  const std::uint32_t end = rule == LayerSplit::kVllm ? stages - 1 : stages;
  for (std::uint32_t stage = end - left; stage < end; ++stage) ++result[stage];
  return result;
}

Sharding::Sharding(const KVShape& shape, const Parallel& parallel)
    : shape_(shape), tp_(parallel.tp), replicas_(1), rank_heads_(0) {
  check_shape(shape);
  check_number("tp", parallel.tp, kRanksMax);
  check_number("pp", parallel.pp, kRanksMax);
  check_number("tp * pp", std::uint64_t{parallel.tp} * parallel.pp, kRanksMax);
  check_heads(shape.kv_heads, parallel.tp);
  if (tp_ > shape.kv_heads) replicas_ = tp_ / shape.kv_heads;
  rank_heads_ = shape.kv_heads * replicas_ / tp_;
  std::uint32_t end = 0;
  for (const std::uint32_t layers : stage_layers_of(shape, parallel)) layer_ends_.push_back(end += layers);
}

std::uint32_t Sharding::stage_of(std::uint32_t layer) const noexcept {
  KVPOOL_CHECK(layer < shape_.layers);
  return static_cast<std::uint32_t>(std::ranges::upper_bound(layer_ends_, layer) - layer_ends_.begin());
}

RankSlice Sharding::slice(std::uint32_t rank) const noexcept {
  KVPOOL_CHECK(rank < ranks());
  RankSlice slice;
  slice.rank = rank;
  slice.stage = rank / tp_;
  slice.tp_rank = rank % tp_;
  slice.layer_first = layer_begin(slice.stage);
  slice.layers = layer_end(slice.stage) - slice.layer_first;
  slice.head_first = slice.tp_rank / replicas_ * rank_heads_;
  slice.heads = rank_heads_;
  slice.replica = slice.tp_rank % replicas_;
  slice.replicas = replicas_;
  return slice;
}

Layout Sharding::rank_layout(std::uint32_t rank, bool aggregated) const {
  Layout layout;
  layout.block_tokens = shape_.block_tokens;
  layout.piece_bytes.assign(std::size_t{shape_.pieces_per_layer()} * slice(rank).layers,
                            rank_heads_ * shape_.head_bytes());
  layout.aggregated = aggregated;
  layout.format = shape_.format();
  layout.format.kv_heads = rank_heads_;
  return layout;
}

std::uint64_t Sharding::rank_bytes(std::uint32_t rank) const noexcept {
  return std::uint64_t{shape_.pieces_per_layer()} * slice(rank).layers * rank_heads_ * shape_.head_bytes();
}

}  // namespace kvpool
