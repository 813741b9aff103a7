#include "kvpool/blocks/block_copy.h"

#include <array>

#include "kvpool/base/check.h"

namespace kvpool {

BlockCopier::BlockCopier(const Arena& from, const Arena& to) {
  KVPOOL_CHECK(from.block_bytes() == to.block_bytes());
  if (from.segments().empty() || to.segments().empty()) return;  // memory that is elsewhere
  const BlockStrip whole{0, 0, from.block_bytes()};
  plan_strips(MediumSpan{from.blocks(), from.segments()}, MediumSpan{to.blocks(), to.segments()}, std::span(&whole, 1),
              true, plan_);
}

void BlockCopier::run(CopyTeam& team, const Address* from, const Address* to, std::size_t n) const noexcept {
  std::array<CopyPiece, 4096> room;  // one batch for the team
  const auto copy = [](void* context, std::span<const CopyPiece> pieces) {
    static_cast<CopyTeam*>(context)->run(pieces);
    return true;
  };
  PieceBatch batch(room, copy, &team);
  for (std::size_t i = 0; i < n;) {
    const std::size_t run = run_length({from + i, n - i}, {to + i, n - i});
    batch.add_run(plan_, block_of(from[i]), block_of(to[i]), run);
    i += run;
  }
  batch.finish();
}

}  // namespace kvpool
