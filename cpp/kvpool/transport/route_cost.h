// What a write by a route costs: a prior, corrected by what writes really took.
//
//   cost(pieces, bytes) = (latency_us + us_per_piece * pieces + us_per_byte * bytes) * correction
//
// The correction is kept by size of the write and of its pieces, since what is wrong about a prior differs there:
// caches, threads, gathering. Sizes that were not seen yet take the correction of all writes together. A correction
// fades within seconds: a route that lost because the machine was busy for a moment is tried again.
//
// Thread-safety: all of it; one word is read for an estimate, one or two are written for a measurement. Measurements
// that come at the same time may displace each other.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvpool {

struct RoutePrior {
  double latency_us;
  double us_per_piece;
  double us_per_byte;
};

// Measured on Sapphire Rapids, 2 MiB pages, scattered pieces of 4 KiB to 64 KiB.
inline constexpr RoutePrior kMemoryPrior{0.2, 0.02, 1 / 12e3};
inline constexpr RoutePrior kCmaPrior{1.5, 0.3, 1 / 7e3};
inline constexpr RoutePrior kSockPrior{15, 0.3, 1 / 3e3};
// Not measured: what the data sheets of an H100 and PCIe 5 lead to expect.
inline constexpr RoutePrior kCudaPrior{12, 0.02, 1 / 40e3};

class RouteCost {
 public:
  explicit RouteCost(const RoutePrior& prior) noexcept : prior_(prior) {}

  // `now_ns`: CLOCK_MONOTONIC.
  double estimate_us(std::uint64_t pieces, std::uint64_t bytes, std::int64_t now_ns) const noexcept;
  // A write took so long. One that was cancelled or failed says nothing and is not told.
  void measured(std::uint64_t pieces, std::uint64_t bytes, double us, std::int64_t now_ns) noexcept;

 private:
  static constexpr std::size_t kByteClasses = 8;   // of the write: up to 4 KiB, 16 KiB, ... and above
  static constexpr std::size_t kPieceClasses = 6;  // of a piece: up to 1 KiB, 4 KiB, ... and above
  // Logarithm of the correction (float) above the time of its last measurement in ms (u32, never 0).
  using Cell = std::atomic<std::uint64_t>;

  double prior_us(std::uint64_t pieces, std::uint64_t bytes) const noexcept;
  static std::size_t cell_of(std::uint64_t pieces, std::uint64_t bytes) noexcept;
  static double faded(std::uint64_t word, std::uint32_t now_ms) noexcept;
  static void correct(Cell& cell, double sample, std::uint32_t now_ms) noexcept;

  const RoutePrior prior_;
  std::array<Cell, kByteClasses * kPieceClasses> cells_{};
  Cell all_{0};
};

}  // namespace kvpool
