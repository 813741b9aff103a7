// Parts of an attention that no kernel computed.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "attention_kit.h"
#include "kvpool/attention/merge_tree.h"
#include "kvpool/attention/partial.h"

namespace kvpool::testing::parts {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr KernelId kAvx2{AttentionIsa::kAvx2, 1};
inline constexpr PartialShape kSmall{2, 3, 8};

// What a kernel could have computed for a range: some rows saw nothing there.
inline PartialNode made_up_node(const PartialShape& shape, TokenRange range, Dice& dice, KernelId kernel = kAvx2) {
  PartialNode node{range, kernel, true, std::vector<float>(PartialNode::floats(shape))};
  float* max = node.values.data() + shape.values();
  for (std::size_t row = 0; row < shape.rows(); ++row) {
    const bool seen = !dice.one_in(5);
    max[row] = seen ? static_cast<float>(20.0 * uniform(dice)) : -kInfinity;
    max[shape.rows() + row] = seen ? static_cast<float>(1.0 + std::abs(uniform(dice))) : 0.0F;
    for (std::size_t d = 0; d < shape.head_dim; ++d) {
      node.values[row * shape.head_dim + d] = seen ? static_cast<float>(uniform(dice)) : 0.0F;
    }
  }
  return node;
}

inline PartialAttention made_up_part(const PartialShape& shape, TokenRange range, Dice& dice) {
  std::vector<PartialNode> nodes;
  for (const TokenRange& node : maximal_nodes(range)) nodes.push_back(made_up_node(shape, node, dice));
  return {shape, std::move(nodes)};
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace kvpool::testing::parts
