#include "kvpool/distributed/sequence_places.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvpool {
namespace {

// Neighbours that lie in one pool, and are held by one view, are one place.
void add_place(Places& places, Sequence::Place place) {
  if (place.blocks.count == 0) return;
  if (!places.empty() && places.back().view == place.view && places.back().blocks.end() == place.blocks.first) {
    places.back().blocks.count += place.blocks.count;
  } else {
    places.push_back(std::move(place));
  }
}

}  // namespace

BlockRange overlap(const BlockRange& a, const BlockRange& b) noexcept {
  const std::uint64_t first = std::max(a.first, b.first);
  const std::uint64_t end = std::min(a.end(), b.end());
  return {first, end > first ? end - first : 0};
}

Places exchanged(const Places& places, const std::vector<BlockRange>& changed, const Places& added) {
  Places parts = added;
  for (const Sequence::Place& place : places) {
    std::uint64_t next = place.blocks.first;
    for (const BlockRange& gone : changed) {
      const BlockRange cut = overlap(place.blocks, gone);
      if (cut.count == 0) continue;
      parts.push_back({{next, cut.first - next}, place.view});
      next = cut.end();
    }
    parts.push_back({{next, place.blocks.end() - next}, place.view});
  }
  std::ranges::sort(parts, {}, [](const Sequence::Place& part) { return part.blocks.first; });
  Places result;
  for (Sequence::Place& part : parts) add_place(result, std::move(part));
  return result;
}

Places parts_at_peers(const Places& places, const std::vector<BlockRange>& changed) {
  Places parts;
  for (const Sequence::Place& place : places) {
    for (const BlockRange& range : changed) {
      const BlockRange blocks = overlap(place.blocks, range);
      if (place.view != nullptr && blocks.count > 0) parts.push_back({blocks, place.view});
    }
  }
  return parts;
}

std::vector<BlockRange> ranges_of(const std::vector<std::uint64_t>& blocks) {
  std::vector<BlockRange> ranges;
  for (const std::uint64_t block : blocks) {
    if (!ranges.empty() && ranges.back().end() == block) {
      ++ranges.back().count;
    } else {
      ranges.push_back({block, 1});
    }
  }
  return ranges;
}

std::vector<std::uint64_t> blocks_from(std::uint64_t first, std::size_t count) {
  std::vector<std::uint64_t> blocks(count);
  std::iota(blocks.begin(), blocks.end(), first);
  return blocks;
}

}  // namespace kvpool
