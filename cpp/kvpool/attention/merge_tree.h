// The order in which partial results of attention are merged, so that the bits of a result do not depend on where the
// tokens lie, how many threads compute, or which part arrives first.
//
// Floating-point addition is not associative: the order of merging is part of the result. It is fixed by the positions
// of the tokens alone. Leaves are kLeafTokens tokens, aligned in the sequence; a node of level k covers 2^k leaves,
// aligned too, and is always the merge of its left half with its right half:
//
//      level 2   0 ............................ 4095
//      level 1   0 ......... 2047   2048 ...... 4095    4096 ...... 6143
//      leaves    0 .. 1023 | ...                                          6144 .. 6499
//                                                                         the ragged leaf of a sequence of 6,500 tokens
//
// A sequence of n tokens is the smallest node that covers it, where a half without tokens is empty, and merging with
// nothing changes no bit. That is the same as this: its maximal nodes, of which each is smaller than the one before it,
// and behind them the ragged leaf, merged from the right: node0 + (node1 + (node2 + ragged)).
//
// A holder of a range computes the maximal nodes of that range, and the collector merges siblings as they meet.
// A range that begins or ends within a leaf has a part of a leaf at that end. Parts of one leaf can be merged, from
// left to right, but the leaf's bits are then those of this cut: only a cut at leaf bounds (and the end of the
// sequence) gives the canonical bits.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/attention/token_range.h"

namespace kvpool {

inline constexpr std::uint64_t kLeafTokens = 1024;

// [begin, end) is a whole leaf or a whole node above leaves.
bool is_tree_node(const TokenRange& range) noexcept;

// 0 for a leaf. REQUIRES: is_tree_node(range).
std::uint32_t tree_level(const TokenRange& range) noexcept;

// `right` is the right half of the node whose left half is `left`. REQUIRES: both are tree nodes.
bool are_siblings(const TokenRange& left, const TokenRange& right) noexcept;

// The leaf, by number, that a token is in.
constexpr std::uint64_t leaf_of(std::uint64_t token) noexcept { return token / kLeafTokens; }

// The maximal nodes of a range in ascending order, with a part of a leaf at an end that is no leaf bound. Each element
// is a tree node or lies within one leaf. REQUIRES: begin <= end <= kSequenceTokensMax.
std::vector<TokenRange> maximal_nodes(const TokenRange& range);

}  // namespace kvpool
