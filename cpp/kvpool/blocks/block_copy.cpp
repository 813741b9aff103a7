#include "kvpool/blocks/block_copy.h"

#include <algorithm>
#include <array>

#include "kvpool/base/check.h"

namespace kvpool {

BlockCopier::BlockCopier(const Arena& from, const Arena& to) {
  KVPOOL_CHECK(from.block_bytes() == to.block_bytes());
  const auto& sources = from.segments();
  const auto& targets = to.segments();
  std::size_t source = 0;
  std::size_t target = 0;
  std::size_t source_done = 0;  // bytes of the current source piece that are planned
  std::size_t target_done = 0;
  while (source < sources.size() && target < targets.size()) {
    const Segment& a = sources[source];
    const Segment& b = targets[target];
    const std::size_t bytes = std::min(a.bytes - source_done, b.bytes - target_done);
    strips_.push_back(Strip{a.base + source_done, b.base + target_done, bytes, a.stride, b.stride});
    source_done += bytes;
    target_done += bytes;
    if (source_done == a.bytes) {
      ++source;
      source_done = 0;
    }
    if (target_done == b.bytes) {
      ++target;
      target_done = 0;
    }
  }
}

void BlockCopier::run(CopyTeam& team, const Address* from, const Address* to, std::size_t n) const noexcept {
  std::array<CopyPiece, 4096> pieces;  // one batch for the team
  std::size_t used = 0;
  const auto flush = [&] {
    team.run(std::span(pieces.data(), used));
    used = 0;
  };
  for (std::size_t i = 0; i < n;) {
    const std::size_t source = block_of(from[i]);
    const std::size_t target = block_of(to[i]);
    std::size_t run = 1;
    while (i + run < n && block_of(from[i + run]) == source + run && block_of(to[i + run]) == target + run) ++run;
    for (const Strip& strip : strips_) {
      const std::byte* a = strip.from + source * strip.from_stride;
      std::byte* b = strip.to + target * strip.to_stride;
      if (strip.joins()) {
        if (used == pieces.size()) flush();
        pieces[used++] = CopyPiece{b, a, strip.bytes * run};
        continue;
      }
      for (std::size_t k = 0; k < run; ++k) {
        if (used == pieces.size()) flush();
        pieces[used++] = CopyPiece{b + k * strip.to_stride, a + k * strip.from_stride, strip.bytes};
      }
    }
    i += run;
  }
  if (used > 0) flush();
}

}  // namespace kvpool
