// The piece length up to which a kernel copies on a GPU, and above which its copy engines do. It is measured once, when
// the first pool on the GPU is made (piece_race.h), in memory allocated for the measurement.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "kvpool/cuda/context.h"
#include "kvpool/cuda/kernels.h"
#include "kvpool/cuda/piece_race.h"

namespace kvpool {

// Where a GPU copies to: from its own memory to the host's, back, and from its own or another GPU's to such memory.
enum class GpuWay : std::uint8_t { kOut, kIn, kWithin };
inline constexpr std::size_t kGpuWays = 3;

// Where nothing was measured. Each piece costs the copy engines one to two microseconds, in which a bus of 64 GB/s
// moves as much or less.
inline constexpr std::size_t kKernelPieceBytesGuess = std::size_t{256} << 10;

// Mean length of a piece up to which a kernel copies.
class CopyBounds {
 public:
  constexpr CopyBounds() noexcept : bytes_{kKernelPieceBytesGuess, kKernelPieceBytesGuess, kKernelPieceBytesGuess} {}
  constexpr std::size_t of(GpuWay way) const noexcept { return bytes_[static_cast<std::size_t>(way)]; }
  constexpr void set(GpuWay way, std::size_t bytes) noexcept { bytes_[static_cast<std::size_t>(way)] = bytes; }
  friend constexpr bool operator==(const CopyBounds&, const CopyBounds&) noexcept = default;

 private:
  std::array<std::size_t, kGpuWays> bytes_;
};

// The bounds of this GPU, for a pool that is being made. The first call in a process measures them, in up to some 150
// milliseconds. The guess, for each way, where the GPU has no memory for it, is too busy to say within that time, or
// refuses; that is tried again for the next pool. Waits for the GPU, as taking its memory does. Throws kDeviceLost.
CopyBounds measured_copy_bounds(const std::shared_ptr<const CudaContext>& context, const cuda::KernelSet& kernels);
// What was measured of the GPU with this number, if anything. Asks nothing of it.
std::optional<CopyBounds> known_copy_bounds(int ordinal);

// Measures, whatever is known; the clock is CLOCK_MONOTONIC but in tests. `complete`: whether no way is a guess.
CopyBounds race_copies(const std::shared_ptr<const CudaContext>& context, const cuda::KernelSet& kernels,
                       const RaceClock& clock, bool* complete = nullptr);

}  // namespace kvpool
