// Which blocks of one pool hold which part of a sequence, as runs of blocks that follow each other in the sequence:
//
//      block of the sequence     0   1   2   3   4   5   6   7   8       T = block_tokens: block i holds the tokens
//                                [ run ]           [   run   ]           [i * T, (i + 1) * T)
//
// A value type. Const methods may be called by several threads at once. Every method that throws has changed nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "kvpool/attention/token_range.h"
#include "kvpool/base/address.h"

namespace kvpool {

// Blocks [first, first + count) of a sequence.
struct BlockRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;

  std::uint64_t end() const noexcept { return first + count; }
  bool operator==(const BlockRange&) const = default;
};

// The blocks that these tokens are in. REQUIRES: there is one.
inline BlockRange blocks_of(const TokenRange& tokens, std::uint64_t block_tokens) noexcept {
  const std::uint64_t first = tokens.begin / block_tokens;
  return {first, (tokens.end - 1) / block_tokens + 1 - first};
}

class BlockRuns {
 public:
  struct Run {
    std::uint64_t first = 0;
    std::vector<Address> addresses;

    BlockRange range() const noexcept { return {first, addresses.size()}; }
    std::uint64_t end() const noexcept { return first + addresses.size(); }
  };

  // Ascending; between two runs at least one block is missing.
  std::span<const Run> runs() const noexcept { return runs_; }
  std::size_t blocks() const noexcept { return blocks_; }

  // Throws kArgument (block) when one of these has an address already.
  void add(std::uint64_t first, std::span<const Address> addresses);
  // Returns the addresses that blocks of the range had.
  std::vector<Address> remove(const BlockRange& range) { return remove(std::vector{range}); }
  // The same for several, in ascending order.
  std::vector<Address> remove(const std::vector<BlockRange>& ranges);
  // The addresses of all blocks of the range; nullopt when one of them has none.
  std::optional<std::span<const Address>> find(const BlockRange& range) const noexcept;
  bool has_any(const BlockRange& range) const noexcept;
  // Where these addresses stand.
  std::vector<BlockRange> places_of(const std::unordered_set<Address>& addresses) const;

 private:
  std::vector<Run>::const_iterator run_behind(std::uint64_t block) const noexcept;

  std::vector<Run> runs_;
  std::size_t blocks_ = 0;
};

}  // namespace kvpool
