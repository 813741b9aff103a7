#include "kvpool/blocks/block_meta.h"

#include <algorithm>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {

const char* block_state_name(BlockState state) noexcept {
  switch (state) {
    case BlockState::kFree:
      return "free";
    case BlockState::kActive:
      return "active";
    case BlockState::kHistorical:
      return "historical";
    case BlockState::kReserved:
      return "reserved";
    case BlockState::kLent:
      return "lent";
    case BlockState::kQuarantined:
      return "quarantined";
    case BlockState::kRetired:
      return "retired";
    case BlockState::kSuspended:
      return "suspended";
  }
  return "unknown";
}

// calloc, because large zeroed memory comes from the kernel untouched.
MetaArray make_meta(std::uint32_t blocks) {
  KVPOOL_CHECK(blocks <= kBlocksMax);
  const std::size_t entries = std::max(blocks, 1U);
  MetaArray meta(static_cast<BlockMeta*>(std::calloc(entries, sizeof(BlockMeta))));
  if (meta == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, "no memory for the metadata of " + std::to_string(blocks) + " blocks",
                {{"bytes", static_cast<std::int64_t>(entries * sizeof(BlockMeta))}});
  }
  return meta;
}

}  // namespace kvpool
