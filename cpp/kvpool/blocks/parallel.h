// How the block of one logical instance is shared among the ranks of a model that runs tensor- and pipeline-parallel.
//
// The content of a logical block is [layer, k/v, head, token, dim] (HND), or [layer, k/v, token, head, dim] (NHD);
// where K and V are fused it is [layer, head, token, 2 * dim], or [layer, token, head, 2 * dim]. Pipeline parallelism
// gives each stage a range of layers; tensor parallelism gives each rank of a stage a range of KV heads, or, if there
// are fewer heads than ranks, one head that neighbouring ranks replicate. So a rank's part of a block is a block of the
// same order with fewer layers and heads:
//
//      6 layers, 2 heads, TP 4, PP 2         tp rank 0     1     2     3
//                               stage 0     ┌─────────────────────────────┐
//                               layers 0-2  │ head 0 head 0 head 1 head 1 │   ranks 0 1 2 3
//                               layers 3-5  │ head 0 head 0 head 1 head 1 │   ranks 4 5 6 7
//                               stage 1     └─────────────────────────────┘
//
// This is how vLLM, SGLang and Megatron number ranks (the tensor-parallel rank runs fastest) and share heads.
// Pure: no I/O, no state. Thread-safety: everything here is const.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/blocks/layout.h"

namespace kvpool {

// The logical block.
struct KVShape {
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  DType dtype = DType::kNone;
  std::uint32_t block_tokens = 0;
  bool tokens_first = false;  // NHD
  bool fused = false;         // one piece a layer, K and V beside each other in its rows

  PageFormat format() const noexcept { return {kv_heads, head_dim, dtype, tokens_first, fused}; }
  std::uint32_t pieces_per_layer() const noexcept { return format().pieces_per_layer(); }
  std::uint64_t row_bytes() const noexcept { return format().row_bytes(); }         // one token of one head of a piece
  std::uint64_t head_bytes() const noexcept { return row_bytes() * block_tokens; }  // one head of a piece
  std::uint64_t piece_bytes() const noexcept { return kv_heads * head_bytes(); }
  std::uint64_t block_bytes() const noexcept { return std::uint64_t{pieces_per_layer()} * layers * piece_bytes(); }
  bool operator==(const KVShape&) const = default;
};

inline constexpr std::uint32_t kShapeNumberMax = 1U << 20;               // of each number of a shape
inline constexpr std::uint64_t kShapeBytesMax = std::uint64_t{1} << 40;  // of a logical block
inline constexpr std::uint32_t kRanksMax = 4096;                         // of a logical instance

// Which stages take the layers that are left over when the number of stages does not divide the number of layers.
enum class LayerSplit : std::uint8_t {
  kVllm,  // one each for the stages before the last one, backwards from there: 5 over 4 is 1 1 2 1, 7 over 4 is 2 2 2 1
  kSglang,  // one each for the last stages: 5 over 4 is 1 1 1 2, 7 over 4 is 1 2 2 2
};

// Layers of each stage. REQUIRES: stages > 0. A stage has no layer when there are fewer layers than stages.
std::vector<std::uint32_t> split_layers(std::uint32_t layers, std::uint32_t stages, LayerSplit rule);

struct Parallel {
  std::uint32_t tp = 1;
  std::uint32_t pp = 1;
  LayerSplit split = LayerSplit::kVllm;
  std::vector<std::uint32_t> stage_layers;  // of each stage, in order; empty: by `split`
};

// What one rank holds of each block.
struct RankSlice {
  std::uint32_t rank = 0;
  std::uint32_t stage = 0;
  std::uint32_t tp_rank = 0;
  std::uint32_t layer_first = 0;  // [layer_first, layer_first + layers) of the model
  std::uint32_t layers = 0;
  std::uint32_t head_first = 0;  // [head_first, head_first + heads) of the KV heads
  std::uint32_t heads = 0;
  std::uint32_t replica = 0;   // its number among the ranks that hold the same content
  std::uint32_t replicas = 1;  // how many neighbouring ranks hold the same content
};

// A shape and a parallel configuration that fit each other.
class Sharding {
 public:
  // Throws kArgument when a number is out of range (value, maximum), when heads cannot be shared evenly (kv_heads, tp),
  // or when explicit stages do not give each layer a place (given, needed).
  Sharding(const KVShape& shape, const Parallel& parallel);

  const KVShape& shape() const noexcept { return shape_; }
  std::uint32_t tp() const noexcept { return tp_; }
  std::uint32_t pp() const noexcept { return static_cast<std::uint32_t>(layer_ends_.size()); }
  std::uint32_t ranks() const noexcept { return tp_ * pp(); }
  std::uint32_t replicas() const noexcept { return replicas_; }      // ranks of a stage that hold the same heads
  std::uint32_t rank_heads() const noexcept { return rank_heads_; }  // heads of every rank

  // [layer_begin, layer_end) of a stage. REQUIRES: stage < pp().
  std::uint32_t layer_begin(std::uint32_t stage) const noexcept { return stage == 0 ? 0 : layer_ends_[stage - 1]; }
  std::uint32_t layer_end(std::uint32_t stage) const noexcept { return layer_ends_[stage]; }

  std::uint32_t stage_of(std::uint32_t layer) const noexcept;  // REQUIRES: layer < shape().layers
  RankSlice slice(std::uint32_t rank) const noexcept;          // REQUIRES: rank < ranks()
  // The layout of the pool or arena that holds a rank's part of the blocks. REQUIRES: rank < ranks()
  Layout rank_layout(std::uint32_t rank, bool aggregated) const;
  std::uint64_t rank_bytes(std::uint32_t rank) const noexcept;  // of one block. REQUIRES: rank < ranks()

 private:
  KVShape shape_;
  std::uint32_t tp_;
  std::uint32_t replicas_;
  std::uint32_t rank_heads_;
  std::vector<std::uint32_t> layer_ends_;  // by stage
};

}  // namespace kvpool
