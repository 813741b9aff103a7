#include "kvpool/attention/token_range.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

std::string named(const TokenRange& range) {
  return "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")";
}

[[noreturn]] void refuse_shared(const TokenRange& a, const TokenRange& b) {
  const TokenRange both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  throw Error(ErrorCode::kArgument, "the tokens " + named(both) + " are covered twice",
              {{"begin", static_cast<std::int64_t>(both.begin)}, {"end", static_cast<std::int64_t>(both.end)}});
}

// Appends ranges that ascend, joining those that touch. Throws kArgument when two share a token.
std::vector<TokenRange> chained(std::vector<TokenRange> ascending) {
  std::size_t count = 0;
  for (const TokenRange& range : ascending) {
    if (count > 0 && ascending[count - 1].overlaps(range)) refuse_shared(ascending[count - 1], range);
    if (count > 0 && ascending[count - 1].end == range.begin) {
      ascending[count - 1].end = range.end;
    } else {
      ascending[count++] = range;
    }
  }
  ascending.resize(count);
  return ascending;
}

bool before(const TokenRange& a, const TokenRange& b) noexcept { return a.begin < b.begin; }

}  // namespace

TokenSet::TokenSet(std::span<const TokenRange> ranges) {
  for (const TokenRange& range : ranges) {
    if (range.begin < range.end && range.end <= kSequenceTokensMax) continue;
    throw Error(ErrorCode::kArgument, named(range) + " is no range of tokens",
                {{"begin", static_cast<std::int64_t>(range.begin)}, {"end", static_cast<std::int64_t>(range.end)}});
  }
  std::vector<TokenRange> sorted(ranges.begin(), ranges.end());
  std::sort(sorted.begin(), sorted.end(), before);
  ranges_ = chained(std::move(sorted));
}

TokenSet TokenSet::joined(const TokenSet& other) const {
  std::vector<TokenRange> both(ranges_.size() + other.ranges_.size());
  std::merge(ranges_.begin(), ranges_.end(), other.ranges_.begin(), other.ranges_.end(), both.begin(), before);
  TokenSet set;
  set.ranges_ = chained(std::move(both));
  return set;
}

std::optional<TokenRange> TokenSet::first_gap(std::uint64_t tokens) const noexcept {
  if (tokens == 0) return std::nullopt;
  if (ranges_.empty()) return TokenRange{0, tokens};
  if (ranges_.front().begin > 0) return TokenRange{0, std::min(tokens, ranges_.front().begin)};
  const std::uint64_t reached = ranges_.front().end;
  if (reached >= tokens) return std::nullopt;
  return TokenRange{reached, ranges_.size() > 1 ? std::min(tokens, ranges_[1].begin) : tokens};
}

}  // namespace kvpool
