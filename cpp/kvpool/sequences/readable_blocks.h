// Blocks of a sequence that lie in memory of this process, or are mapped here.
#pragma once

#include <memory>

#include "kvpool/base/segment.h"
#include "kvpool/sequences/block_runs.h"

namespace kvpool {

struct ReadableBlocks {
  std::shared_ptr<const BlockRuns> runs;
  std::shared_ptr<const MediaSpans> spans;  // where they lie; null: in the arenas of this pool
  std::shared_ptr<void> hold;               // until the last copy is dropped, the blocks keep their content
};

}  // namespace kvpool
