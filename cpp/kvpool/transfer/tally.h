// How many transfers a pool has begun and how they ended, for monitoring: see docs/how-to/metrics.md.
//
// Thread-safety: all of it. Threads count without a common lock, so the numbers of a snapshot may differ by the
// transfers that end meanwhile.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kvpool/base/error.h"

namespace kvpool {

enum class TransferKind : std::uint8_t { kSend, kFetch };

class TransferTally {
 public:
  static constexpr std::size_t kKinds = 2;
  static constexpr std::size_t kOutcomes = 1 + kErrorCodes;
  // Upper bounds of the durations of successful transfers; longer ones fall into one more bucket.
  static constexpr std::array<std::int64_t, 12> kBoundsNs{30'000,      100'000,       300'000,       1'000'000,
                                                          3'000'000,   10'000'000,    30'000'000,    100'000'000,
                                                          300'000'000, 1'000'000'000, 3'000'000'000, 10'000'000'000};

  struct Counts {
    std::array<std::uint64_t, kOutcomes> ended{};                 // 0: success; 1 + an ErrorCode
    std::uint64_t bytes = 0;                                      // written by all of them
    std::uint64_t duration_ns = 0;                                // sum over the successful ones
    std::array<std::uint64_t, kBoundsNs.size() + 1> durations{};  // successful ones by duration
  };

  void ended(TransferKind kind, const std::optional<Error>& error, std::uint64_t bytes,
             std::int64_t duration_ns) noexcept {
    Live& live = live_[static_cast<std::size_t>(kind)];
    add(live.ended[error ? 1 + static_cast<std::size_t>(error->code()) : 0], 1);
    add(live.bytes, bytes);
    if (error) return;
    const auto bucket = std::lower_bound(kBoundsNs.begin(), kBoundsNs.end(), duration_ns) - kBoundsNs.begin();
    add(live.durations[static_cast<std::size_t>(bucket)], 1);
    add(live.duration_ns, static_cast<std::uint64_t>(std::max<std::int64_t>(duration_ns, 0)));
  }

  Counts counts(TransferKind kind) const noexcept {
    const Live& live = live_[static_cast<std::size_t>(kind)];
    Counts counts;
    for (std::size_t i = 0; i < kOutcomes; ++i) counts.ended[i] = live.ended[i].load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < live.durations.size(); ++i) {
      counts.durations[i] = live.durations[i].load(std::memory_order_relaxed);
    }
    counts.bytes = live.bytes.load(std::memory_order_relaxed);
    counts.duration_ns = live.duration_ns.load(std::memory_order_relaxed);
    return counts;
  }

 private:
  using Counter = std::atomic<std::uint64_t>;
  struct Live {
    std::array<Counter, kOutcomes> ended{};
    Counter bytes{0};
    Counter duration_ns{0};
    std::array<Counter, kBoundsNs.size() + 1> durations{};
  };

  static void add(Counter& counter, std::uint64_t n) noexcept { counter.fetch_add(n, std::memory_order_relaxed); }

  std::array<Live, kKinds> live_{};
};

}  // namespace kvpool
