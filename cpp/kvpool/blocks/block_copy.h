// Copies whole blocks between two arenas of one pool, whatever the layout of each, and blocks in pieces.
#pragma once

#include <cstddef>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/copy.h"
#include "kvpool/base/strips.h"
#include "kvpool/blocks/block_pieces.h"

namespace kvpool {

// Plans once how the segments of two arenas meet, then copies any number of blocks. The content of a block is the
// concatenation of its pieces, so a piece of one arena may be several of the other's.
//
// Thread-safety: run() may be called by several threads.
class BlockCopier {
 public:
  // Copies nothing between arenas whose memory is in other processes. REQUIRES: equal block_bytes; both arenas outlive
  // the copier.
  BlockCopier(const Arena& from, const Arena& to);

  // Copies block from[i] to block to[i] for i in [0, n). Blocks that are neighbours on both sides are copied as
  // one run. Uses only the stack. REQUIRES: `to` has no duplicates.
  void run(CopyTeam& team, const Address* from, const Address* to, std::size_t n) const noexcept;

 private:
  std::vector<PlannedStrip> plan_;
};

// The same between views of the units of a space, for a cache whose blocks may lie in several pieces on either side.
//
// Thread-safety: run() may be called by several threads.
class PieceCopier {
 public:
  // REQUIRES: both are views of units with equal block_bytes, which are as many whole units as a block has; their
  // blocks have as many pieces; all of it outlives the copier.
  PieceCopier(const Arena& from, const BlockPieces& from_pieces, const Arena& to, const BlockPieces& to_pieces);

  // As BlockCopier::run(). REQUIRES: nobody frees the blocks meanwhile.
  void run(CopyTeam& team, const Address* from, const Address* to, std::size_t n) const noexcept;

 private:
  const BlockPieces& from_pieces_;
  const BlockPieces& to_pieces_;
  PlannedStrip whole_;
  PlannedStrip piece_;
};

}  // namespace kvpool
