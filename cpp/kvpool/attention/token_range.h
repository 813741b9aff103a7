// Ranges of token positions in one sequence, and sorted lists of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvpool {

// No sequence is longer, so arithmetic on positions does not overflow.
inline constexpr std::uint64_t kSequenceTokensMax = std::uint64_t{1} << 48;

// The tokens at positions [begin, end) of a sequence.
struct TokenRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t tokens() const noexcept { return end - begin; }
  bool overlaps(const TokenRange& other) const noexcept { return begin < other.end && other.begin < end; }
  bool operator==(const TokenRange&) const = default;
};

// A set of tokens. Invariant: its ranges are not empty, ascending, and no two of them touch.
class TokenSet {
 public:
  TokenSet() = default;
  // Throws kArgument when a range has no token or ends behind kSequenceTokensMax (begin, end), or when two overlap
  // (begin, end of the tokens that they share).
  explicit TokenSet(std::span<const TokenRange> ranges);

  std::span<const TokenRange> ranges() const noexcept { return ranges_; }
  bool empty() const noexcept { return ranges_.empty(); }
  // The tokens of both. Throws kArgument when they share a token (begin, end), and changes nothing then.
  TokenSet joined(const TokenSet& other) const;
  // The first tokens of [0, tokens) that are missing; nullopt when none is.
  std::optional<TokenRange> first_gap(std::uint64_t tokens) const noexcept;
  // One behind the last token; 0 when empty.
  std::uint64_t end() const noexcept { return ranges_.empty() ? 0 : ranges_.back().end; }
  bool operator==(const TokenSet&) const = default;

 private:
  std::vector<TokenRange> ranges_;
};

}  // namespace kvpool
