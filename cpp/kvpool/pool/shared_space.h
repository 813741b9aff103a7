// The memory of several models: units, from which each model's pool makes blocks of the size that the model needs.
//
// Thread-safety: immutable after construction, but for what BlockSpace and SpaceReclaimer guard themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/arena/arena.h"
#include "kvpool/base/medium.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/pool/pool.h"

namespace kvpool {

class BlockSpace;
class SpaceReclaimer;

struct SharedSpaceOptions {
  std::size_t unit_bytes = 0;  // a power of two from kUnitBytesMin to kUnitBytesMax
  MediumMap<std::uint32_t> units{};
  std::uint32_t models_max = 16;  // at a time
  HugePages huge_pages = HugePages::kAuto;
  int numa_node = -1;
  bool check_memory = true;
  int copy_threads = 2;
};

class SharedSpace {
 public:
  static constexpr std::size_t kUnitBytesMin = std::size_t{4} << 10;
  static constexpr std::size_t kUnitBytesMax = std::size_t{64} << 10;

  // Throws kArgument, kOutOfMemory, kUnsupported.
  explicit SharedSpace(const SharedSpaceOptions& options);

  BlockSpace& space() const noexcept { return *space_; }
  // What a pool with this layout is made from, whose blocks may be cut into so many pieces. Throws kArgument: a block
  // must be one run of bytes, and fit; its pieces must be whole units.
  SpaceShare share(const Layout& layout, std::uint32_t pieces = 1) const;

 private:
  const std::size_t unit_bytes_;
  const std::shared_ptr<BlockSpace> space_;
  const std::shared_ptr<SpaceReclaimer> reclaimer_;
  MediumMap<std::shared_ptr<Arena>> memory_;  // null without units
};

}  // namespace kvpool
