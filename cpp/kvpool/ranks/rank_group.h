// Divides a write of a logical instance among its ranks.
//
// The scheduler of a logical instance speaks of blocks as if one rank held them; a transfer asks for ranges of that
// logical content: all of it, a layer, a piece. Every rank holds its slice of a block under the same block number, so
// an order to a rank needs no addresses for that rank, only what to write to which rank of the receiver.
// docs/adr/0008-logical-instances.md says which process sends orders to which.
//
// Pure. Thread-safety: everything here is const after it is made.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/base/strips.h"
#include "kvpool/transfer/reshard.h"

namespace kvpool {

// What one rank writes into one rank of the receiver.
struct ChannelWrite {
  std::uint32_t to_rank = 0;
  std::uint64_t bytes = 0;  // of each block
  std::vector<BlockStrip> strips;
};

// What one rank has to write. Each rank begins with a different receiver, so that they do not all write to the same one
// at first.
struct RankOrder {
  std::uint32_t from_rank = 0;
  std::vector<ChannelWrite> channels;

  std::uint64_t bytes() const noexcept;  // of each block
};

// The orders for these ranges of the logical content, for the ranks that have something to do, by rank. Each range
// stays a separate strip and is not joined with its neighbour. Throws kArgument for a strip that is not the same range
// on both sides, does not consist of whole pieces (K or V of a layer), or does not lie behind the strip before it.
std::vector<RankOrder> rank_orders(const ReshardPlan& plan, std::span<const BlockStrip> logical);

}  // namespace kvpool
