// A naive model of how blocks are spread over ranks, for tests: every byte of a logical block has a number, and shards
// are copied out of it by nested loops that share no code with kvpool.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/blocks/parallel.h"
#include "thrown.h"

namespace kvpool::testing {

using Bytes32 = std::vector<std::uint32_t>;  // the number of each byte

// itemsize is 1 or 2.
inline KVShape shape_of(std::uint32_t layers, std::uint32_t heads, std::uint32_t dim = 2, std::uint32_t itemsize = 2,
                        std::uint32_t tokens = 4) {
  return {.layers = layers,
          .kv_heads = heads,
          .head_dim = dim,
          .dtype = itemsize == 1 ? DType::kInt8 : DType::kBfloat16,
          .block_tokens = tokens};
}

inline Parallel parallel_of(std::uint32_t tp, std::uint32_t pp, LayerSplit split = LayerSplit::kVllm) {
  return {.tp = tp, .pp = pp, .split = split, .stage_layers = {}};
}

// As the engines' sources have it, word by word: vllm/distributed/utils.py and sglang's distributed/utils.py.
inline std::vector<std::uint32_t> engine_split(std::uint32_t layers, std::uint32_t stages, LayerSplit rule) {
  std::vector<std::uint32_t> partitions(stages, layers / stages);
  const std::uint32_t left = layers % stages;
  if (rule == LayerSplit::kVllm) {
    for (std::uint32_t i = 2; left > 0 && i < left + 2; ++i) ++partitions[stages - i];
  } else {
    for (std::uint32_t rank = 0; rank < stages; ++rank) {
      if (rank >= stages - left) ++partitions[rank];
    }
  }
  return partitions;
}

// The rank's part of a block, by number, without the planner's arithmetic.
inline Bytes32 shard(const KVShape& shape, const Parallel& parallel, std::uint32_t rank) {
  const std::vector<std::uint32_t> stages =
      parallel.stage_layers.empty() ? engine_split(shape.layers, parallel.pp, parallel.split) : parallel.stage_layers;
  const std::uint32_t stage = rank / parallel.tp;
  const std::uint32_t tp_rank = rank % parallel.tp;
  Bytes32 content;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    std::uint32_t owner = 0;
    for (std::uint32_t seen = stages[0]; layer >= seen; seen += stages[owner]) ++owner;
    if (owner != stage) continue;
    const std::uint32_t pieces = shape.fused ? 1 : 2;
    for (std::uint32_t piece = 0; piece < pieces; ++piece) {
      // HND: all tokens of a head in a row; NHD: all heads of a token.
      const std::uint32_t rows = shape.tokens_first ? shape.block_tokens : 1;
      const auto head_bytes = static_cast<std::uint32_t>(shape.tokens_first ? shape.row_bytes() : shape.head_bytes());
      for (std::uint32_t row = 0; row < rows; ++row) {
        for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
          const bool mine = parallel.tp <= shape.kv_heads ? head / (shape.kv_heads / parallel.tp) == tp_rank
                                                          : tp_rank / (parallel.tp / shape.kv_heads) == head;
          if (!mine) continue;
          for (std::uint32_t byte = 0; byte < head_bytes; ++byte) {
            content.push_back((((layer * pieces + piece) * rows + row) * shape.kv_heads + head) * head_bytes + byte);
          }
        }
      }
    }
  }
  return content;
}

}  // namespace kvpool::testing
