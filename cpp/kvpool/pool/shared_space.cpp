#include "kvpool/pool/shared_space.h"

#include <bit>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/blocks/block_space.h"
#include "kvpool/pool/space_reclaimer.h"

namespace kvpool {
namespace {

std::size_t checked_unit(std::size_t bytes) {
  if (std::has_single_bit(bytes) && bytes >= SharedSpace::kUnitBytesMin && bytes <= SharedSpace::kUnitBytesMax) {
    return bytes;
  }
  throw Error(ErrorCode::kArgument,
              "a unit has " + std::to_string(bytes) + " bytes; it must be a power of two from " +
                  std::to_string(SharedSpace::kUnitBytesMin) + " to " + std::to_string(SharedSpace::kUnitBytesMax),
              {{"value", static_cast<std::int64_t>(bytes)}});
}

std::shared_ptr<Arena> make_memory(const SharedSpaceOptions& options, Medium medium) {
  if (options.units[medium] == 0) return nullptr;
  ArenaOptions arena;
  arena.medium = medium;
  arena.blocks = 1;
  arena.segment_bytes = {options.units[medium] * options.unit_bytes};
  arena.huge_pages = options.huge_pages;
  arena.numa_node = options.numa_node;
  arena.check_memory = options.check_memory;
  arena.label = medium == Medium::kHbm ? "kvpool-space-hbm" : "kvpool-space-dram";
  arena.commit_threads = options.copy_threads;
  return make_owned_arena(arena);
}

}  // namespace

SharedSpace::SharedSpace(const SharedSpaceOptions& options)
    : unit_bytes_(checked_unit(options.unit_bytes)),
      space_(std::make_shared<BlockSpace>(options.units, options.models_max)),
      reclaimer_(std::make_shared<SpaceReclaimer>()),
      memory_{make_memory(options, Medium::kHbm), make_memory(options, Medium::kDram), nullptr} {
  const SpaceLock lock = space_->lock();
  space_->enforce_quotas();
  space_->set_pressure_hook(reclaimer_);
}

SpaceShare SharedSpace::share(const Layout& layout, std::uint32_t pieces) const {
  if (!layout.aggregated) {
    throw Error(ErrorCode::kArgument,
                "a block of a space is one run of bytes: the layout must be aggregated, and is discrete");
  }
  const std::size_t bytes = layout.block_bytes();
  const std::size_t units = (bytes + unit_bytes_ - 1) / unit_bytes_;
  if (pieces == 0 || (pieces > 1 && bytes % (pieces * unit_bytes_) != 0)) {
    throw Error(ErrorCode::kArgument,
                "a block of " + std::to_string(bytes) + " bytes in " + std::to_string(pieces) +
                    " pieces: each must be whole units of " + std::to_string(unit_bytes_) + " bytes",
                {{"block_bytes", static_cast<std::int64_t>(bytes)}, {"pieces", pieces}});
  }
  SpaceShare share{space_, static_cast<std::uint32_t>(units), {}, reclaimer_, pieces};
  bool fits = false;
  for (const Medium medium : kMedia) {
    const std::uint32_t blocks =
        units > space_->capacity(medium) ? 0 : space_->numbers(medium, static_cast<std::uint32_t>(units));
    fits = fits || blocks > 0;
    if (memory_[medium] != nullptr) {
      share.arenas[medium] = make_view_arena(memory_[medium], blocks, bytes, unit_bytes_);
    } else if (medium != Medium::kDisk) {
      ArenaOptions nothing;
      nothing.medium = medium;
      nothing.segment_bytes = {bytes};
      share.arenas[medium] = make_owned_arena(nothing);
    } else {
      share.arenas[medium] = make_absent_arena(medium, 0, bytes);
    }
  }
  if (!fits) {
    throw Error(ErrorCode::kArgument, "a block of " + std::to_string(bytes) + " bytes does not fit into the space",
                {{"block_bytes", static_cast<std::int64_t>(bytes)}});
  }
  return share;
}

}  // namespace kvpool
