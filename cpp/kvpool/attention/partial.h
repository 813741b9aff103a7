// What attention over a part of a sequence's tokens gives, so that parts computed in different places can be put
// together: DistAttention's micro-attention, and its ScaleReduce as merge().
//
// For every query row (a query token and a head), over the tokens t that the part covers and the row may see:
//
//      max = max_t s_t        s_t = q . k_t * scale * log2(e), so that exp2(s_t) = exp(q . k_t * scale)
//      sum = sum_t exp2(s_t - max)
//      acc = sum_t exp2(s_t - max) * v_t        not divided by the sum
//
// in fp32 and base 2. A row that sees none of the tokens has max -inf, sum 0 and acc 0.
//
// A part knows which tokens it covers. This is what keeps a merge honest: parts that share a token are refused, and a
// result cannot be read before every token is covered. The merge order is fixed by positions (merge_tree.h), so a part
// keeps its nodes apart until siblings meet.
//
//   A4  nodes are in ascending order and disjoint; each is a tree node, or a piece: tokens of one leaf. No two are
//       siblings, and no leaf is whole in pieces.
//   A5  foreign values (from_lse) are in the order of their first token. They are merged last.
//   A6  `covers` is the union of what nodes and foreign values cover, which are disjoint.
//
// A value type: copies are independent; one thread at a time changes a part. Every call that throws has changed
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/attention/token_range.h"
#include "kvpool/base/page_format.h"

namespace kvpool {

// Query tokens, query heads, and elements of a head.
struct PartialShape {
  std::uint32_t tokens = 0;
  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;

  std::size_t rows() const noexcept { return std::size_t{tokens} * heads; }
  std::size_t values() const noexcept { return rows() * head_dim; }
  bool operator==(const PartialShape&) const = default;
};

// Which code computed a leaf. Kernels differ in their last bits, so only parts of one kernel are bit-identical however
// the tokens were split. The numbers go over the wire.
enum class AttentionIsa : std::uint8_t {
  kPortable = 0,
  kAvx2 = 1,
  kAvx512 = 2,
  kAvx512Bf16 = 3,
  kSm80 = 4,  // GPUs, by the target that the kernel was compiled for
  kSm90 = 5,
  kSm100 = 6,
};
inline constexpr AttentionIsa kAttentionIsaMax = AttentionIsa::kSm100;

struct KernelId {
  AttentionIsa isa = AttentionIsa::kPortable;
  std::uint8_t version = 0;  // raised when a change to the kernel changes bits

  bool operator==(const KernelId&) const = default;
};

// "avx2/1"
std::string kernel_name(const KernelId& kernel);

enum class LseBase : std::uint8_t { kTwo, kE };                    // lse is log2, or the natural logarithm
enum class RowOrder : std::uint8_t { kHeadsFirst, kTokensFirst };  // [head, token] or [token, head]

// The rows of one node, in one piece of memory. Rows are heads-first: row = head * tokens + token.
struct PartialNode {
  TokenRange range;                // a tree node, or tokens of one leaf
  std::optional<KernelId> kernel;  // nullopt: several
  bool exact = true;               // one kernel computed it all, and no leaf in it was put together from pieces
  std::vector<float> values;       // acc [row, dim], then max [row], then sum [row]

  static std::size_t floats(const PartialShape& shape) noexcept { return shape.values() + 2 * shape.rows(); }
};

class PartialAttention {
 public:
  // Covers nothing: merging with it changes nothing. Throws kArgument when a number of the shape is 0 or too large.
  explicit PartialAttention(const PartialShape& shape);

  // Of nodes that a kernel computed, here or at a peer, in any order. Throws kArgument when a range is neither a tree
  // node nor within one leaf, when ranges share a token, or when a node has not as many values as the shape needs.
  PartialAttention(const PartialShape& shape, std::vector<PartialNode> nodes);

  // Of what another implementation gave for the tokens `covers`: its output [token, head, dim], normalised, and the
  // logarithm of the sum of exponentials of each row. There is no default for the base or the order of lse, since both
  // differ between implementations and a wrong one gives a plausible, wrong result. lse is -inf in a row that saw no
  // token; its output is not read. Throws kArgument when the sizes do not fit the shape, `covers` is empty or overlaps
  // itself, the type is not float32, float16 or bfloat16, or lse is NaN or +inf (FlashAttention's mark for a row
  // without tokens: pass -inf there).
  static PartialAttention from_lse(const PartialShape& shape, std::span<const std::byte> out, DType dtype,
                                   std::span<const float> lse, LseBase base, RowOrder order,
                                   std::span<const TokenRange> covers);

  const PartialShape& shape() const noexcept { return shape_; }
  const TokenSet& covers() const noexcept { return covers_; }
  bool empty() const noexcept { return covers_.empty(); }

  // True when the bits are the canonical ones: one kernel computed everything, and no part is cut within a leaf except
  // at the end of what it covers. False also says no more than that: values are right within rounding either way.
  bool exact() const noexcept;
  // The kernel of all nodes; nullopt without nodes, when they differ, or when foreign values are in it.
  std::optional<KernelId> kernel() const noexcept;

  // Adds what `part` covers. Throws kArgument when the shapes differ, or when both cover a token (begin, end).
  void merge(PartialAttention part);

  // Makes one node of neighbours that are pieces of one leaf, merged from left to right: then the nodes of a range that
  // was computed in several pieces are those of maximal_nodes().
  void join_pieces() noexcept;

  // Throws kState unless the part covers exactly [0, tokens): when tokens are missing (begin, end of the first gap;
  // tokens), or there are more (covered, tokens).
  void check_covers(std::uint64_t tokens) const;

  // Writes the result [token, head, dim] when the part covers exactly [0, tokens); rows that may see no token are zero.
  // Throws as check_covers(), and kArgument when the type is not float32, float16 or bfloat16, or `out` has not the
  // bytes of the result.
  void finish(DType dtype, std::uint64_t tokens, std::span<std::byte> out) const;

  // Writes for each row the logarithm of the sum of exponentials over what the part covers, also when that is not all:
  // -inf where it is nothing. Throws kArgument when `out` has not one element for each row.
  void lse(LseBase base, RowOrder order, std::span<float> out) const;

  // For sending: A4 says what they are. Foreign values are not among them; has_foreign() says whether there are any.
  std::span<const PartialNode> nodes() const noexcept { return nodes_; }
  bool has_foreign() const noexcept { return !foreign_.empty(); }
  // The nodes; the part is not used any more.
  std::vector<PartialNode> take_nodes() && noexcept { return std::move(nodes_); }

 private:
  struct Foreign {
    TokenSet covers;
    std::vector<float> values;  // as in a PartialNode
  };

  void join_siblings() noexcept;      // restores A4 after nodes were added in order
  std::vector<float> folded() const;  // all merged into one, in the order of merge_tree.h; empty: nothing

  PartialShape shape_;
  TokenSet covers_;
  std::vector<PartialNode> nodes_;
  std::vector<Foreign> foreign_;
};

// All of them merged, in any order. Throws kArgument for an empty list, and as merge() does.
PartialAttention merged(std::span<const PartialAttention> parts);

}  // namespace kvpool
