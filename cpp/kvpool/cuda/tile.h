// The work of one lane of a warp on one tile of a job. For both compilers: the kernels run it over GPU memory, the
// tests, lane by lane, over a memory that counts accesses.
//
// `Memory` has, for unit types T of 1, 4 and 16 bytes:
//   T load<T>(std::uint64_t address)              of what the job reads
//   void store<T>(std::uint64_t address, const T& unit)
// Lanes share nothing and need no order among them. A lane issues all its loads of a tile before its first store, so
// that kUnitsInFlight reads are under way at a time.
#pragma once

#include <cstdint>

#include "kvpool/cuda/table.h"

namespace kvpool::cuda {

struct alignas(16) Unit16 {
  std::uint32_t words[4];
};

// Where a tile lies.
struct TilePlace {
  DeviceStrip strip;
  std::uint64_t from;  // of the strip, in the pair's block
  std::uint64_t to;
  std::uint64_t first;  // the first unit of the strip in the tile
};

// The last strip whose tile_begin is at most `tile`.
KVPOOL_HOST_DEVICE inline std::uint32_t strip_of_tile(const TableView& table, std::uint32_t tile) {
  if (table.header->tiles_of_strip.divisor != 0) return table.header->tiles_of_strip.divide(tile);
  std::uint32_t low = 0;
  std::uint32_t high = table.header->strips;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (table.strips()[middle].tile_begin <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

KVPOOL_HOST_DEVICE inline TilePlace place_of_tile(const TableView& table, std::uint32_t tile) {
  const std::uint32_t pair_index = table.header->tiles_of_pair.divide(tile);
  const std::uint32_t tile_of_pair = tile - pair_index * table.header->tiles_of_pair.divisor;
  TilePlace place;
  place.strip = table.strips()[strip_of_tile(table, tile_of_pair)];
  const DevicePair pair = table.pairs()[pair_index];
  place.from = place.strip.from + pair.from * place.strip.from_stride;
  place.to = place.strip.to + pair.to * place.strip.to_stride;
  place.first = static_cast<std::uint64_t>(tile_of_pair - place.strip.tile_begin) * kTileUnits;
  return place;
}

// Copies bytes unchanged; of the tail, each lane copies one byte.
template <class T, class Memory>
KVPOOL_HOST_DEVICE inline void copy_tile(const TableView& table, std::uint32_t tile, std::uint32_t lane,
                                         Memory& memory) {
  const TilePlace place = place_of_tile(table, tile);
  const std::uint64_t left = place.strip.units - place.first;
  const std::uint64_t at = (place.first + lane) * sizeof(T);
  T units[kUnitsInFlight] = {};
  if (left >= kTileUnits) {
    KVPOOL_UNROLL
    for (std::uint32_t k = 0; k < kUnitsInFlight; ++k) {
      units[k] = memory.template load<T>(place.from + at + k * kWarpLanes * sizeof(T));
    }
    KVPOOL_UNROLL
    for (std::uint32_t k = 0; k < kUnitsInFlight; ++k) {
      memory.template store<T>(place.to + at + k * kWarpLanes * sizeof(T), units[k]);
    }
    if (left > kTileUnits) return;
  } else {
    KVPOOL_UNROLL
    for (std::uint32_t k = 0; k < kUnitsInFlight; ++k) {
      if (lane + k * kWarpLanes < left) {
        units[k] = memory.template load<T>(place.from + at + k * kWarpLanes * sizeof(T));
      }
    }
    KVPOOL_UNROLL
    for (std::uint32_t k = 0; k < kUnitsInFlight; ++k) {
      if (lane + k * kWarpLanes < left) {
        memory.template store<T>(place.to + at + k * kWarpLanes * sizeof(T), units[k]);
      }
    }
  }
  if (lane < place.strip.tail) {
    const std::uint64_t tail = place.strip.units * sizeof(T) + lane;
    memory.template store<std::uint8_t>(place.to + tail, memory.template load<std::uint8_t>(place.from + tail));
  }
}

// The work for one width, for run_thread.
template <class T>
struct CopyWork {
  template <class Memory>
  static KVPOOL_HOST_DEVICE void run(const TableView& table, std::uint32_t tile, std::uint32_t lane, Memory& memory) {
    copy_tile<T>(table, tile, lane, memory);
  }
};

inline constexpr std::uint32_t kBlockThreads = 256;
inline constexpr std::uint32_t kBlockWarps = kBlockThreads / kWarpLanes;

// The work of one thread of a grid: its warp's share of the tiles. The stride is the whole grid, so neighbouring warps
// move neighbouring tiles at about the same time, and both sides advance through memory in one wide front.
template <class Work, class Memory>
KVPOOL_HOST_DEVICE inline void run_thread(const TableView& table, std::uint32_t block, std::uint32_t blocks,
                                          std::uint32_t thread, Memory& memory) {
  const std::uint32_t step = blocks * kBlockWarps;
  // Ends without passing 2^32: tiles are fewer than 2^31, and so is a grid's stride.
  for (std::uint32_t tile = block * kBlockWarps + thread / kWarpLanes; tile < table.header->tiles; tile += step) {
    Work::run(table, tile, thread % kWarpLanes, memory);
  }
}

// Calls use(Work) with the work for this width; only this function knows all widths. False for any other width.
template <class Use>
bool with_work(std::uint32_t width, Use use) {
  switch (width) {
    case 16:
      use(CopyWork<Unit16>{});
      return true;
    case 4:
      use(CopyWork<std::uint32_t>{});
      return true;
    case 1:
      use(CopyWork<std::uint8_t>{});
      return true;
    default:
      return false;
  }
}

}  // namespace kvpool::cuda
