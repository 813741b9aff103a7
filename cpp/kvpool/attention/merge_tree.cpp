#include "kvpool/attention/merge_tree.h"

#include <algorithm>
#include <bit>

namespace kvpool {

bool is_tree_node(const TokenRange& range) noexcept {
  if (range.begin >= range.end) return false;
  const std::uint64_t tokens = range.tokens();
  return tokens >= kLeafTokens && std::has_single_bit(tokens) && range.begin % tokens == 0;
}

std::uint32_t tree_level(const TokenRange& range) noexcept {
  return static_cast<std::uint32_t>(std::countr_zero(range.tokens() / kLeafTokens));
}

bool are_siblings(const TokenRange& left, const TokenRange& right) noexcept {
  return left.end == right.begin && left.tokens() == right.tokens() && left.begin % (2 * left.tokens()) == 0;
}

std::vector<TokenRange> maximal_nodes(const TokenRange& range) {
  std::vector<TokenRange> nodes;
  std::uint64_t at = range.begin;
  while (at < range.end) {
    const std::uint64_t into_leaf = at % kLeafTokens;
    const std::uint64_t left = range.end - at;
    if (into_leaf != 0 || left < kLeafTokens) {
      const std::uint64_t to = std::min(range.end, at - into_leaf + kLeafTokens);
      nodes.push_back({at, to});
      at = to;
      continue;
    }
    // The largest power of two that divides the position and is not more than what is left.
    const std::uint64_t fits = std::bit_floor(left);
    const std::uint64_t aligned = at == 0 ? fits : std::uint64_t{1} << std::countr_zero(at);
    nodes.push_back({at, at + std::min(fits, aligned)});
    at = nodes.back().end;
  }
  return nodes;
}

}  // namespace kvpool
