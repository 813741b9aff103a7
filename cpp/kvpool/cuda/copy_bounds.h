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

// The direction of a copy: from GPU memory to host memory, back, and between memories of GPUs.
enum class GpuWay : std::uint8_t { kOut, kIn, kWithin };
inline constexpr std::size_t kGpuWays = 3;

// Used without a measurement. Each piece costs the copy engines one to two microseconds, in which a bus of 64 GB/s
// moves at most this much.
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
// milliseconds. A direction gets the guess if the GPU has too little memory, is too busy to finish within that time, or
// refuses; the next pool measures that direction again. Waits for the GPU, as allocating its memory does. Throws
// kDeviceLost.
CopyBounds measured_copy_bounds(const std::shared_ptr<const CudaContext>& context, const cuda::KernelSet& kernels);
// The measured bounds of the GPU with this number, if any. Does not use the GPU.
std::optional<CopyBounds> known_copy_bounds(int ordinal);

// Always measures; tests replace the clock, CLOCK_MONOTONIC. `complete`: whether every direction was measured.
CopyBounds race_copies(const std::shared_ptr<const CudaContext>& context, const cuda::KernelSet& kernels,
                       const RaceClock& clock, bool* complete = nullptr);

}  // namespace kvpool
