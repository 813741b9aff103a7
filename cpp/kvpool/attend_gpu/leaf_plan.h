// A call of attention as the kernels of cuda/attention want it: a table of leaves, one of blocks, and one of merges,
// level by level along the tree of attention/merge_tree.h.
//
//   A14  Nodes lie in front of all other leaves, so that what a caller wants is one run of floats. A node begins as its
//        first leaf; merging makes it whole.
//   A15  Of two pairs of one level none shares a leaf, so their order does not matter. The levels are in order.
//
// Pure: knows no driver. The tests run such a plan by the CPU's kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpool/attention/attend.h"
#include "kvpool/cuda/driver.h"

namespace kvpool {

// The three structures below are read by kernels: the same members, in this order, as cuda/attention/kernels.py has
// them. tests/python/cuda/test_attention_cubins.py compares.

// One leaf, or a piece of one.
struct LeafTask {
  std::int64_t q_at = 0;         // elements before its queries
  std::int64_t first_block = 0;  // that it has tokens in: into the tables of blocks
  std::int64_t first_token = 0;  // counted from the beginning of that block
  std::int64_t tokens = 0;
  std::int64_t skip = 0;    // tokens of its first tile that stand before it: tiles are aligned in the sequence
  std::int64_t seen = 0;    // query token 0 sees the tokens below, counted like first_token
  std::int64_t out_at = 0;  // floats before its rows, which lie as in a PartialNode
  std::int64_t query_tokens = 0;
};

// The left node becomes the merge of both.
struct MergePair {
  std::int64_t left_at = 0;  // floats
  std::int64_t right_at = 0;
  std::int64_t rows = 0;
};

// What attend_leaves is passed.
struct LeafArguments {
  CuPointer q = 0;
  CuPointer k = 0;  // the lowest address of K and of V, of the layer, in any block: blocks are counted from there
  CuPointer v = 0;
  CuPointer k_blocks = 0;
  CuPointer v_blocks = 0;
  CuPointer tasks = 0;
  CuPointer out = 0;
  std::int64_t head_stride = 0;  // elements
  std::int64_t token_stride = 0;
  std::int32_t block_tokens = 0;
  std::int32_t group = 0;  // query heads of a KV head
  std::int32_t query_heads = 0;
  float scale_log2e = 0;
};

// What merge_pairs is passed.
struct MergeArguments {
  CuPointer values = 0;
  CuPointer pairs = 0;
};

inline constexpr std::uint64_t kBlockUnit = 16;  // bytes: what the tables of blocks count

// What one call asks of a GPU.
struct LeafPlan {
  struct Node {
    std::size_t item;
    TokenRange range;
    std::size_t at;  // floats
    std::size_t floats;
  };

  LeafArguments arguments;             // without the addresses of q, out and tables
  std::vector<std::int64_t> k_blocks;  // of each block that has a token of a range
  std::vector<std::int64_t> v_blocks;
  std::vector<LeafTask> tasks;
  std::vector<MergePair> pairs;          // those of the lowest level first
  std::vector<std::size_t> level_pairs;  // how many there are of each level
  std::vector<Node> nodes;               // of each item in turn, in ascending order
  std::vector<std::size_t> q_bytes;      // of each item's queries, one behind the other; 0: those of the one before
  std::size_t node_floats = 0;           // of all nodes
  std::size_t floats = 0;                // of all leaves
  std::uint32_t kv_heads = 0;
  std::uint32_t group_rows_max = 0;  // query rows of a KV head, of the item that has most
  std::uint32_t rows_max = 0;        // of all heads
};

// What the kernels cannot do is kUnsupported, and the message says what: another number of elements in a head, types
// that differ, K or V that is not aligned to 16 bytes, more rows than a grid has. Throws kArgument as explain() does.
// Of the addresses of K and V nothing is read. `tile` is of the kernel that is to compute.
LeafPlan plan_leaves(const AttendCall& call, std::uint32_t tile);

}  // namespace kvpool
