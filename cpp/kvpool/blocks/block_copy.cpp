#include "kvpool/blocks/block_copy.h"

#include <array>

#include "kvpool/base/check.h"

namespace kvpool {

namespace {

using BatchRoom = std::array<CopyPiece, 4096>;  // one batch for the team

bool copy_batch(void* team, std::span<const CopyPiece> pieces) {
  static_cast<CopyTeam*>(team)->run(pieces);
  return true;
}

}  // namespace

BlockCopier::BlockCopier(const Arena& from, const Arena& to) {
  KVPOOL_CHECK(from.block_bytes() == to.block_bytes());
  if (from.segments().empty() || to.segments().empty()) return;  // memory that is elsewhere
  const BlockStrip whole{0, 0, from.block_bytes()};
  plan_strips(MediumSpan{from.blocks(), from.segments()}, MediumSpan{to.blocks(), to.segments()}, std::span(&whole, 1),
              true, plan_);
}

void BlockCopier::run(CopyTeam& team, const Address* from, const Address* to, std::size_t n) const noexcept {
  BatchRoom room;
  PieceBatch batch(room, copy_batch, &team);
  for (std::size_t i = 0; i < n;) {
    const std::size_t run = run_length({from + i, n - i}, {to + i, n - i});
    batch.add_run(plan_, block_of(from[i]), block_of(to[i]), run);
    i += run;
  }
  batch.finish();
}

PieceCopier::PieceCopier(const Arena& from, const BlockPieces& from_pieces, const Arena& to,
                         const BlockPieces& to_pieces)
    : from_pieces_(from_pieces), to_pieces_(to_pieces) {
  KVPOOL_CHECK(from.block_bytes() == to.block_bytes() && from_pieces.pieces() == to_pieces.pieces());
  const Segment& source = from.segments().front();
  const Segment& target = to.segments().front();
  whole_ = {source.base, target.base, from.block_bytes(), source.stride, target.stride};
  piece_ = whole_;
  piece_.bytes = from.block_bytes() / from_pieces.pieces();
}

void PieceCopier::run(CopyTeam& team, const Address* from, const Address* to, std::size_t n) const noexcept {
  BatchRoom room;
  PieceBatch batch(room, copy_batch, &team);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t source = block_of(from[i]);
    const std::uint32_t target = block_of(to[i]);
    if (from_pieces_.whole(source) && to_pieces_.whole(target)) {
      batch.add_run({&whole_, 1}, source, target, 1);
      continue;
    }
    for (std::uint32_t piece = 0; piece < from_pieces_.pieces(); ++piece) {
      batch.add_run({&piece_, 1}, from_pieces_.unit_of(source, piece), to_pieces_.unit_of(target, piece), 1);
    }
  }
  batch.finish();
}

}  // namespace kvpool
