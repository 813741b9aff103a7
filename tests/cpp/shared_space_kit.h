// A space whose pools have blocks of different sizes in the same memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvpool/blocks/block_space.h"
#include "pool_fixture.h"

namespace kvpool::testing {

inline constexpr std::size_t kUnitBytes = 32;
inline constexpr std::array kTiers{Medium::kHbm, Medium::kDram};

// A space whose caches find the same bytes at the same units.
struct Space {
  Space(std::uint32_t hbm, std::uint32_t dram, std::uint32_t caches_max)
      : units{hbm, dram}, space(std::make_shared<BlockSpace>(units, caches_max)) {
    for (const Medium medium : kTiers) {
      memory[medium] = std::make_shared<std::vector<std::byte>>((units[medium] + 1) * kUnitBytes);
    }
  }

  std::shared_ptr<Pool> make_pool(std::uint32_t block_units, bool audit = true) {
    PoolOptions options = small_options(0, 0);
    options.layout.piece_bytes = {block_units * kUnitBytes};
    options.audit = audit;
    SpaceShare share{space, block_units, {}};
    for (const Medium medium : kTiers) {
      const std::size_t bytes = block_units * kUnitBytes;
      share.arenas[medium] = make_adopted_arena(medium, units[medium] / block_units,
                                                {Segment{memory[medium]->data(), bytes, bytes}}, memory[medium]);
    }
    share.arenas[Medium::kDisk] = make_absent_arena(Medium::kDisk, 0, block_units * kUnitBytes);
    return std::make_shared<Pool>(options, std::move(share));
  }

  UnitCounts counts(Medium medium) const {
    const SpaceLock lock = space->lock();
    return space->counts(medium);
  }

  MediumMap<std::uint32_t> units;
  MediumMap<std::shared_ptr<std::vector<std::byte>>> memory;
  std::shared_ptr<BlockSpace> space;
};

inline std::uint32_t in_state(Pool& pool, BlockState state, Medium medium = Medium::kHbm) {
  return pool.stats().media[medium].by_state[static_cast<std::size_t>(state)];
}

}  // namespace kvpool::testing
