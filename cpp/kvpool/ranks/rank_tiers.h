// The two tiers of a rank. Moves blocks between them when the scheduler says so: with the CPU, or with the GPU if HBM
// is on one.
//
// Thread-safety: copy() may be called by several threads.
#pragma once

#include <memory>

#include "kvpool/blocks/device_mover.h"
#include "kvpool/exec/copy_threads.h"
#include "kvpool/ranks/rank_messages.h"
#include "kvpool/routes/local_memory.h"

namespace kvpool {

class RankTiers {
 public:
  // The executor outlives it. Throws as DeviceMover.
  RankTiers(const LocalMemory& memory, Executor& executor, int threads);

  // Copies from one tier to the other. On a GPU, the copy begins after all work that the GPU was given before. Returns
  // when the bytes have arrived. Throws kArgument for blocks that do not exist, or that do not all go the same way, and
  // as DeviceMover::move.
  void copy(const LocalMemory& memory, const CopyBody& body);

 private:
  CopyThreads copiers_;
  const std::unique_ptr<DeviceMover> mover_;  // null without a GPU
};

}  // namespace kvpool
