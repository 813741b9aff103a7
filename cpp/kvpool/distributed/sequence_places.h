// Arithmetic over the places of a sequence: which of its blocks lie where, before and after a change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpool/distributed/sequence.h"

namespace kvpool {

using Places = std::vector<Sequence::Place>;

BlockRange overlap(const BlockRange& a, const BlockRange& b) noexcept;

// Blocks that follow each other, as ranges.
std::vector<BlockRange> ranges_of(const std::vector<std::uint64_t>& blocks);
std::vector<std::uint64_t> blocks_from(std::uint64_t first, std::size_t count);

// `places` with those of `added`, which are all of the blocks `changed`, in the place of what was there.
Places exchanged(const Places& places, const std::vector<BlockRange>& changed, const Places& added);
// What of `places` is at peers and among the blocks `changed`.
Places parts_at_peers(const Places& places, const std::vector<BlockRange>& changed);

}  // namespace kvpool
