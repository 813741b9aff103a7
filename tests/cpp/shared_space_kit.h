// A space whose pools have blocks of different sizes in the same memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
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
      const std::size_t bytes = (units[medium] + 1) * kUnitBytes;
      const auto held = std::make_shared<std::vector<std::byte>>(bytes);
      memory[medium] = make_adopted_arena(medium, 1, {Segment{held->data(), bytes, bytes}}, held);
    }
  }

  std::shared_ptr<Pool> make_pool(std::uint32_t block_units, bool audit = true, std::uint32_t pieces = 1) {
    PoolOptions options = small_options(0, 0);
    options.layout.piece_bytes = {block_units * kUnitBytes};
    options.audit = audit;
    SpaceShare share{space, block_units, {}, nullptr, pieces};
    for (const Medium medium : kTiers) {
      share.arenas[medium] =
          make_view_arena(memory[medium], space->numbers(medium, block_units), block_units * kUnitBytes, kUnitBytes);
    }
    share.arenas[Medium::kDisk] = make_absent_arena(Medium::kDisk, 0, block_units * kUnitBytes);
    return std::make_shared<Pool>(options, std::move(share));
  }

  // The bytes of each piece of a block.
  std::vector<std::span<std::byte>> pieces_of(Pool& pool, Address address, std::uint32_t block_units) const {
    std::vector<std::int32_t> units(pool.pieces());
    pool.block_table(&address, 1, units.data());
    std::vector<std::span<std::byte>> pieces;
    for (const std::int32_t unit : units) {
      std::byte* const first = memory[medium_of(address)]->segments().front().base;
      pieces.emplace_back(first + static_cast<std::size_t>(unit) * kUnitBytes, block_units / units.size() * kUnitBytes);
    }
    return pieces;
  }

  UnitCounts counts(Medium medium) const {
    const SpaceLock lock = space->lock();
    return space->counts(medium);
  }

  MediumMap<std::uint32_t> units;
  MediumMap<std::shared_ptr<Arena>> memory;
  std::shared_ptr<BlockSpace> space;
};

inline std::uint32_t in_state(Pool& pool, BlockState state, Medium medium = Medium::kHbm) {
  return pool.stats().media[medium].by_state[static_cast<std::size_t>(state)];
}

// Blocks for which there is no room, because other pools have blocks there.
inline std::uint32_t displaced(Pool& pool, Medium medium = Medium::kHbm) {
  return pool.stats().media[medium].displaced;
}

}  // namespace kvpool::testing
