// The description of a job for a kernel, cut into tiles, each of which a warp moves at a time. kernel_plan.cpp writes
// it and the GPU reads it, so this header is for both compilers and includes only fixed-size types.
//
//   tile t ──►  pair  t / tiles_of_pair          which blocks
//               strip by t % tiles_of_pair       which part of them: tile_begin of the strips ascends
//               tile within the strip            kTileUnits units of `width` bytes, the last one shorter
//
// A table is a header, its strips, then its pairs:
//
//   TableHeader │ DeviceStrip[strips] │ BlockPair[pairs]
//
// It travels inside the launch (a kernel's arguments, read through the constant cache) if it is at most
// kInlineTableBytes long; otherwise it lies in memory of the device, with only the header in the launch.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define KVPOOL_HOST_DEVICE __host__ __device__
#else
#define KVPOOL_HOST_DEVICE
#endif

// Loops whose arrays have to be registers.
#ifdef __CUDA_ARCH__
#define KVPOOL_UNROLL _Pragma("unroll")
#else
#define KVPOOL_UNROLL
#endif

namespace kvpool::cuda {

inline constexpr std::uint32_t kWarpLanes = 32;
inline constexpr std::uint32_t kUnitsInFlight = 4;                        // loads of a lane before its first store
inline constexpr std::uint32_t kTileUnits = kWarpLanes * kUnitsInFlight;  // 2 KiB at 16 bytes a unit

// Division by a number that is known when the job is planned: a multiplication and a shift. Granlund and Montgomery,
// "Division by invariant integers using multiplication", for dividends below 2^31.
struct FastDivider {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = 1;  // of divisor 1
  std::uint32_t shift = 0;

  FastDivider() = default;
  // REQUIRES: 0 < by < 2^31.
  explicit FastDivider(std::uint32_t by) : divisor(by) {
    while ((std::uint64_t{1} << shift) < by) ++shift;
    multiplier = static_cast<std::uint32_t>((((std::uint64_t{1} << shift) - by) << 32) / by + 1);
  }
  KVPOOL_HOST_DEVICE std::uint32_t divide(std::uint32_t value) const {
#ifdef __CUDA_ARCH__
    const std::uint32_t high = __umulhi(value, multiplier);
#else
    const auto high = static_cast<std::uint32_t>((std::uint64_t{value} * multiplier) >> 32);
#endif
    return (high + value) >> shift;
  }
};

struct TableHeader {
  std::uint32_t tiles = 0;
  std::uint32_t strips = 0;
  FastDivider tiles_of_pair;
  FastDivider tiles_of_strip;  // divisor 0 unless all strips have the same number of tiles
};

struct DeviceStrip {
  std::uint64_t from;
  std::uint64_t to;
  std::uint64_t from_stride;
  std::uint64_t to_stride;
  std::uint64_t units;       // of `width` bytes each, without the tail
  std::uint32_t tile_begin;  // tiles of a pair before this strip's
  std::uint32_t tail;        // remaining bytes
};
static_assert(sizeof(DeviceStrip) == 48);

struct DevicePair {
  std::uint32_t from;
  std::uint32_t to;
};
static_assert(sizeof(DevicePair) == 8);

inline constexpr std::size_t table_bytes(std::size_t strips, std::size_t pairs) {
  return strips * sizeof(DeviceStrip) + pairs * sizeof(DevicePair);
}

// A table that travels with the launch; a shorter table is a prefix of it.
template <std::size_t kBytes>
struct InlineTable {
  TableHeader header;
  alignas(8) unsigned char data[kBytes];
};

// Where the strips and pairs of a table are.
struct TableView {
  const TableHeader* header;
  const unsigned char* data;

  KVPOOL_HOST_DEVICE const DeviceStrip* strips() const { return reinterpret_cast<const DeviceStrip*>(data); }
  KVPOOL_HOST_DEVICE const DevicePair* pairs() const {
    return reinterpret_cast<const DevicePair*>(data + std::size_t{header->strips} * sizeof(DeviceStrip));
  }
};

}  // namespace kvpool::cuda
