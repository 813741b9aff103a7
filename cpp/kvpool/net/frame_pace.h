// How long the payload of a frame should be, by what the link was measured to take.
//
// Nothing gets around a frame that was begun: not the messages of others, not the end of a transfer that was cancelled.
// So a frame should take the link a few milliseconds. On a fast link that is as much as a frame may have.
//
// Thread-safety: one thread at a time measures; payload_bytes() is anybody's.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvpool {

class FramePace {
 public:
  // A frame, or what was sent of it, kept its sender busy for so long.
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
