// The cost of a write by a route: a prior, corrected by the time that writes took.
//
//   cost(pieces, bytes) = (latency_us + us_per_piece * pieces + us_per_byte * bytes) * correction + arrival
//
// The prior is a guess until it was measured between two media: see transfer/route_probe.h. Arrival has the same form
// and is the receiver's work after the write has ended; it is 0 for a guess. The correction is kept by size of the
// write and of its pieces, since the error of a prior depends on both: caches, threads, gathering. Sizes without
// measurements use the correction of all writes together. Where a piece costs more as a call than among others, writes
// that must not gather have a cost with us_per_call, and corrections, apart. A correction fades within seconds, to the
// prior: a route that lost because the machine was busy for a moment is tried again.
//
// Thread-safety: all of it. An estimate reads one pointer and one word, a measurement writes one or two words. Of
// simultaneous measurements some may be lost.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/media_set.h"
#include "kvpool/routes/write_size.h"

namespace kvpool {

struct RoutePrior {
  double latency_us;
  double us_per_piece;
  double us_per_byte;

  double us(const WriteSize& size) const noexcept {
    return latency_us + us_per_piece * static_cast<double>(size.pieces) + us_per_byte * static_cast<double>(size.bytes);
  }
};

// Measured on Sapphire Rapids, 2 MiB pages, scattered pieces of 4 KiB to 64 KiB.
inline constexpr RoutePrior kMemoryPrior{0.2, 0.02, 1 / 12e3};
inline constexpr RoutePrior kCmaPrior{1.5, 0.3, 1 / 7e3};
inline constexpr RoutePrior kSockPrior{15, 0.3, 1 / 3e3};
// What a piece costs more as a call than among others. Measured with 8,000 pieces of 128 bytes.
inline constexpr double kCmaCallUs = 1.3;
inline constexpr double kSockCallUs = 2.2;
// Not measured: derived from the data sheets of an H100 and PCIe 5.
inline constexpr RoutePrior kCudaPrior{12, 0.02, 1 / 40e3};

class RouteCost {
 public:
  // `us_per_call`: what a piece costs more in a write that must not gather; 0: nothing, for the route never gathers, or
  // always.
  explicit RouteCost(const RoutePrior& guess, double us_per_call = 0) noexcept
      : us_per_call_(us_per_call), guess_(guess, {0, 0, 0}) {}

  // For several pairs of media, returns the highest cost of a pair. `now_ns`: CLOCK_MONOTONIC.
  double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                     std::int64_t now_ns) const noexcept;
  // Records the time of a write. Do not record a write that was cancelled or failed. A write over several pairs of
  // media with separate priors is ignored.
  void measured(const MediaSet& from, const MediaSet& to, const WriteSize& size, double us,
                std::int64_t now_ns) noexcept;

  // Sets the prior between these two media and resets its corrections, atomically for estimates. Throws std::bad_alloc,
  // and has changed nothing then.
  void set_prior(Medium from, Medium to, const RoutePrior& write, const RoutePrior& arrival = {0, 0, 0});
  // The sum of the two priors of set_prior(); nullopt if it was not called for these media.
  std::optional<RoutePrior> measured_prior(Medium from, Medium to) const noexcept;
  const RoutePrior& guess() const noexcept { return guess_.write; }

 private:
  static constexpr std::size_t kByteClasses = 8;   // of the write: up to 4 KiB, 16 KiB, ... and above
  static constexpr std::size_t kPieceClasses = 6;  // of a piece: up to 1 KiB, 4 KiB, ... and above
  // Logarithm of the correction (float) above the time of its last measurement in ms (u32, never 0).
  using Cell = std::atomic<std::uint64_t>;

  struct Corrections {
    std::array<Cell, kByteClasses * kPieceClasses> cells{};
    Cell all{0};
  };

  // A prior and its corrections.
  struct Table {
    Table(const RoutePrior& for_write, const RoutePrior& for_arrival) noexcept
        : write(for_write), arrival(for_arrival) {}

    const RoutePrior write;
    const RoutePrior arrival;
    Corrections together;
    Corrections apart;  // of writes whose pieces are calls
  };

  Table* table_of(Medium from, Medium to) noexcept {
    Table* const table = tables_[from][to].load(std::memory_order_acquire);
    return table != nullptr ? table : &guess_;
  }
  const Table* table_of(Medium from, Medium to) const noexcept {
    const Table* const table = tables_[from][to].load(std::memory_order_acquire);
    return table != nullptr ? table : &guess_;
  }
  bool is_apart(const WriteSize& size) const noexcept { return !size.gather && us_per_call_ > 0; }
  double expected_us(const Table& table, const WriteSize& size) const noexcept;
  double estimate_us(const Table& table, const WriteSize& size, std::int64_t now_ns) const noexcept;
  static std::size_t cell_of(const WriteSize& size) noexcept;
  static double faded(std::uint64_t word, std::uint32_t now_ms) noexcept;
  static void correct(Cell& cell, double sample, std::uint32_t now_ms) noexcept;

  const double us_per_call_;
  Table guess_;
  MediumPairMap<std::atomic<Table*>> tables_{};  // null: the guess
  std::mutex mutex_;
  // Under mutex_. Keeps every prior that was set, because an estimate may still read one that has been replaced.
  std::vector<std::unique_ptr<Table>> measured_;
};

// The prior of this route as text, for messages.
struct RoutePrice {
  std::string route;
  std::optional<std::pair<Medium, Medium>> between;  // the measured pair; nullopt: a guess for all
  RoutePrior prior;
};

}  // namespace kvpool
