// The two tiers of a rank, and the blocks that its scheduler has it move between them: by the CPU, or by its GPU where
// HBM is on one.
//
// Thread-safety: copy() may be called by several threads.
#pragma once

#include <memory>

#include "kvpool/base/copy.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/ranks/rank_messages.h"

namespace kvpool {

class RankTiers {
 public:
  // Throws as DeviceMover.
  RankTiers(const LocalMemory& memory, int threads);

  // From one tier to the other, in this memory. On a GPU after all that it has been given. Returns when the bytes are
  // there. Throws kArgument for blocks that do not exist, or that do not all go the same way, and as DeviceMover::move.
  void copy(const LocalMemory& memory, const CopyBody& body);

 private:
  CopyTeam team_;
  const std::unique_ptr<DeviceMover> mover_;  // null without a GPU
};

}  // namespace kvpool
