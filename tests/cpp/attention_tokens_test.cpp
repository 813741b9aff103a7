// Ranges of tokens: sets of them, and the nodes of the merge tree that tile a range.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/attention/merge_tree.h"
#include "kvpool/attention/token_range.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

using testing::Dice;

TEST_CASE("a set of tokens keeps its ranges apart, in order and without overlap") {
  const std::array ranges{TokenRange{10, 20}, TokenRange{0, 5}, TokenRange{5, 7}};
  const TokenSet set(ranges);
  CHECK(std::ranges::equal(set.ranges(), std::array{TokenRange{0, 7}, TokenRange{10, 20}}));
  CHECK(set.end() == 20);
  CHECK(set.first_gap(20) == TokenRange{7, 10});
  CHECK(set.first_gap(9) == TokenRange{7, 9});
  CHECK(set.first_gap(7) == std::nullopt);
  CHECK(TokenSet().first_gap(0) == std::nullopt);
  CHECK(TokenSet().first_gap(3) == TokenRange{0, 3});
  const std::array late{TokenRange{2, 4}};
  CHECK(TokenSet(late).first_gap(4) == TokenRange{0, 2});

  const std::array gap{TokenRange{7, 10}};
  CHECK(set.joined(TokenSet(gap)).first_gap(20) == std::nullopt);
  const std::array overlapping{TokenRange{19, 30}};
  CHECK_THROWS_AS((void)set.joined(TokenSet(overlapping)), Error);
  for (const TokenRange bad : {TokenRange{3, 3}, TokenRange{4, 3}, TokenRange{0, kSequenceTokensMax + 1}}) {
    CHECK_THROWS_AS((TokenSet(std::span(&bad, 1))), Error);
  }
}

TEST_CASE("the maximal nodes of a range tile it, are aligned, and no two of them are siblings") {
  Dice dice(1);
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t begin = dice.one_in(2) ? dice.below(40) * kLeafTokens : dice.below(40 * kLeafTokens);
    const std::uint64_t end = begin + (dice.one_in(2) ? dice.below(40) * kLeafTokens : dice.below(40 * kLeafTokens));
    const std::vector<TokenRange> nodes = maximal_nodes({begin, end});
    std::uint64_t at = begin;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      CHECK(nodes[i].begin == at);
      at = nodes[i].end;
      CHECK(nodes[i].begin < nodes[i].end);
      const bool inner = i > 0 && i + 1 < nodes.size();
      if (inner) CHECK(is_tree_node(nodes[i]));
      if (!is_tree_node(nodes[i])) CHECK(leaf_of(nodes[i].begin) == leaf_of(nodes[i].end - 1));
      if (i > 0 && is_tree_node(nodes[i]) && is_tree_node(nodes[i - 1])) {
        CHECK_FALSE(are_siblings(nodes[i - 1], nodes[i]));
      }
    }
    CHECK(at == end);
  }
  CHECK(maximal_nodes({0, 6500}) == std::vector<TokenRange>{{0, 4096}, {4096, 6144}, {6144, 6500}});
  CHECK(tree_level({4096, 8192}) == 2);
  CHECK(are_siblings({0, 1024}, {1024, 2048}));
  CHECK_FALSE(are_siblings({1024, 2048}, {2048, 3072}));
  CHECK_FALSE(is_tree_node({1024, 3072}));
}

}  // namespace
}  // namespace kvpool
