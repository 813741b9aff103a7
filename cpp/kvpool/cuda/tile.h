// What one lane of a warp does with one tile of a job. For both compilers: the kernels run it over memory of the GPU,
// the tests over a memory that counts what is touched, lane by lane.
//
// `Memory` has, for unit types T of 1, 2, 4, 8 and 16 bytes:
//   T load<T>(std::uint64_t address)              of what the job reads
//   void store<T>(std::uint64_t address, const T& unit)
// Lanes share nothing and need no order among them. A lane issues all its loads of a tile before its first store, so
// that kUnitsInFlight reads are under way at a time.
#pragma once

#include "kvpool/cuda/fp8.h"
#include "kvpool/cuda/table.h"

namespace kvpool::cuda {

struct alignas(16) Unit16 {
  std::uint32_t words[4];
};
struct alignas(8) Unit8 {
  std::uint32_t words[2];
};

// Where a tile lies.
struct TilePlace {
  DeviceStrip strip;
  std::uint64_t from;  // of the strip, in the pair's block
  std::uint64_t to;
  std::uint64_t first;  // unit of the strip that the tile begins with
};

// The last strip whose tile_begin is not above `tile`.
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

// Bytes as they are. The tail goes byte by byte, a byte a lane.
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

// Rows in another order. Units divide rows, so there is no tail.
template <class T, class Memory>
KVPOOL_HOST_DEVICE inline void permute_tile(const TableView& table, std::uint32_t tile, std::uint32_t lane,
                                            Memory& memory) {
  const TilePlace place = place_of_tile(table, tile);
  const RowTable& rows = table.header->rows;
  T units[kUnitsInFlight] = {};
  std::uint64_t to[kUnitsInFlight] = {};
  KVPOOL_UNROLL
  for (std::uint32_t k = 0; k < kUnitsInFlight; ++k) {
    const auto unit = static_cast<std::uint32_t>(place.first) + k * kWarpLanes + lane;
    if (unit < place.strip.units) {
      const std::uint32_t row = rows.units_of_row.divide(unit);
      const std::uint32_t outer = rows.inner.divide(row);
      const std::uint32_t inner = row - outer * rows.inner.divisor;
      const std::uint64_t at = (unit - row * rows.units_of_row.divisor) * sizeof(T);
      units[k] =
          memory.template load<T>(place.from + outer * rows.from_outer_pitch + inner * rows.from_inner_pitch + at);
      to[k] = place.to + outer * rows.to_outer_pitch + inner * rows.to_inner_pitch + at;
    }
  }
  KVPOOL_UNROLL
  for (std::uint32_t k = 0; k < kUnitsInFlight; ++k) {
    const auto unit = static_cast<std::uint32_t>(place.first) + k * kWarpLanes + lane;
    if (unit < place.strip.units) memory.template store<T>(to[k], units[k]);
  }
}

// Eight values of a unit, two of a word.
KVPOOL_HOST_DEVICE inline Unit8 e4m3_of_unit(const Unit16& unit, bool bfloat16, float scale) {
  Unit8 result{};
  KVPOOL_UNROLL
  for (std::uint32_t word = 0; word < 4; ++word) {
    const std::uint32_t both = e4m3_of_halves(unit.words[word], bfloat16, scale);
    result.words[word / 2] |= both << (word % 2 * 16);
  }
  return result;
}
KVPOOL_HOST_DEVICE inline std::uint8_t e4m3_of_unit(std::uint16_t unit, bool bfloat16, float scale) {
  return e4m3_of_half(unit, bfloat16, scale);
}

// 16-bit floats to e4m3: From is Unit16 and To is Unit8, or, where something is not aligned, std::uint16_t and
// std::uint8_t. The tail goes value by value, a value a lane.
template <class From, class To, class Memory>
KVPOOL_HOST_DEVICE inline void fp8_tile(const TableView& table, std::uint32_t tile, std::uint32_t lane,
                                        Memory& memory) {
  static_assert(sizeof(From) == 2 * sizeof(To));
  const TilePlace place = place_of_tile(table, tile);
  const bool bfloat16 = table.header->bfloat16 != 0;
  const float scale = place.strip.scale;
  From units[kUnitsInFlight] = {};
  KVPOOL_UNROLL
  for (std::uint32_t k = 0; k < kUnitsInFlight; ++k) {
    const std::uint64_t unit = place.first + k * kWarpLanes + lane;
    if (unit < place.strip.units) units[k] = memory.template load<From>(place.from + unit * sizeof(From));
  }
  KVPOOL_UNROLL
  for (std::uint32_t k = 0; k < kUnitsInFlight; ++k) {
    const std::uint64_t unit = place.first + k * kWarpLanes + lane;
    if (unit < place.strip.units) {
      memory.template store<To>(place.to + unit * sizeof(To), e4m3_of_unit(units[k], bfloat16, scale));
    }
  }
  if (place.strip.units - place.first <= kTileUnits && lane < place.strip.tail) {
    const auto value = memory.template load<std::uint16_t>(place.from + place.strip.units * sizeof(From) + lane * 2);
    memory.template store<std::uint8_t>(place.to + place.strip.units * sizeof(To) + lane,
                                        e4m3_of_half(value, bfloat16, scale));
  }
}

// One kind of work each, for run_thread.
template <class T>
struct CopyWork {
  template <class Memory>
  static KVPOOL_HOST_DEVICE void run(const TableView& table, std::uint32_t tile, std::uint32_t lane, Memory& memory) {
    copy_tile<T>(table, tile, lane, memory);
  }
};
template <class T>
struct PermuteWork {
  template <class Memory>
  static KVPOOL_HOST_DEVICE void run(const TableView& table, std::uint32_t tile, std::uint32_t lane, Memory& memory) {
    permute_tile<T>(table, tile, lane, memory);
  }
};
template <class From, class To>
struct Fp8Work {
  template <class Memory>
  static KVPOOL_HOST_DEVICE void run(const TableView& table, std::uint32_t tile, std::uint32_t lane, Memory& memory) {
    fp8_tile<From, To>(table, tile, lane, memory);
  }
};

inline constexpr std::uint32_t kBlockThreads = 256;
inline constexpr std::uint32_t kBlockWarps = kBlockThreads / kWarpLanes;

// All that a thread of a grid does: its warp's share of the tiles. With the stride of the whole grid neighbouring warps
// move neighbouring tiles at about the same time, so that both sides advance through memory in one wide front.
template <class Work, class Memory>
KVPOOL_HOST_DEVICE inline void run_thread(const TableView& table, std::uint32_t block, std::uint32_t blocks,
                                          std::uint32_t thread, Memory& memory) {
  const std::uint32_t step = blocks * kBlockWarps;
  // Ends without passing 2^32: tiles are fewer than 2^31, and so is a grid's stride.
  for (std::uint32_t tile = block * kBlockWarps + thread / kWarpLanes; tile < table.header->tiles; tile += step) {
    Work::run(table, tile, thread % kWarpLanes, memory);
  }
}

// Calls use(Work) with the work of a launch: the one place that knows which kinds and widths there are. False for
// others.
template <class Use>
bool with_work(std::uint32_t kind, std::uint32_t width, Use use) {
  switch (kind << 8 | width) {
    case 0x010:
      use(CopyWork<Unit16>{});
      return true;
    case 0x004:
      use(CopyWork<std::uint32_t>{});
      return true;
    case 0x001:
      use(CopyWork<std::uint8_t>{});
      return true;
    case 0x110:
      use(PermuteWork<Unit16>{});
      return true;
    case 0x104:
      use(PermuteWork<std::uint32_t>{});
      return true;
    case 0x101:
      use(PermuteWork<std::uint8_t>{});
      return true;
    case 0x210:
      use(Fp8Work<Unit16, Unit8>{});
      return true;
    case 0x202:
      use(Fp8Work<std::uint16_t, std::uint8_t>{});
      return true;
    default:
      return false;
  }
}

}  // namespace kvpool::cuda
