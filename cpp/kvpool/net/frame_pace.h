// Chooses the payload size of a frame from the measured speed of the link.
//
// Once a frame has begun, everything else waits behind it: messages of other threads, and the cancellation of the
// frame's transfer. So a frame should occupy the link for a few milliseconds only. A fast link sends the largest
// allowed frame in that time.
//
// Thread-safety: one thread at a time calls measured(); any thread may call payload_bytes().
#pragma once

#include <atomic>
#include <cstdint>

namespace kvpool {

class FramePace {
 public:
  // The sender was busy for `busy_ns` with `bytes` of a frame.
  void measured(std::uint64_t bytes, std::int64_t busy_ns) noexcept;
  std::uint64_t payload_bytes() const noexcept { return payload_bytes_.load(std::memory_order_relaxed); }

  static constexpr std::int64_t kFrameNs = 5'000'000;
  static constexpr std::uint64_t kBytesMin = std::uint64_t{8} << 10;  // less costs more than it is worth
  static constexpr std::uint64_t kBytesMax = std::uint64_t{4} << 20;
  static constexpr std::uint64_t kBytesAtFirst = std::uint64_t{256} << 10;

 private:
  // The kernel takes some MiB at once before it makes a sender wait, so a single frame says little.
  static constexpr std::uint64_t kWindowBytes = std::uint64_t{8} << 20;

  std::uint64_t window_bytes_ = 0;
  std::int64_t window_ns_ = 0;
  std::atomic<std::uint64_t> payload_bytes_{kBytesAtFirst};
};

}  // namespace kvpool
