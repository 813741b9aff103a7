#include "kvpool/net/frame_pace.h"

#include <algorithm>

namespace kvpool {

void FramePace::measured(std::uint64_t bytes, std::int64_t busy_ns) noexcept {
  window_bytes_ += bytes;
  window_ns_ += busy_ns;
  if (window_ns_ < kFrameNs && window_bytes_ < kWindowBytes) return;
  const double each =
      static_cast<double>(window_bytes_) * kFrameNs / static_cast<double>(std::max(window_ns_, std::int64_t{1}));
  payload_bytes_.store(static_cast<std::uint64_t>(std::clamp<double>(each, kBytesMin, kBytesMax)),
                       std::memory_order_relaxed);
  window_bytes_ = 0;
  window_ns_ = 0;
}

}  // namespace kvpool
