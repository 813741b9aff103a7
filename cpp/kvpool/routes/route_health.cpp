#include "kvpool/routes/route_health.h"

#include <algorithm>
#include <cmath>
#include <new>

namespace kvpool {
namespace {

constexpr double kDearer = 9.2;  // ln 10,000: right after a failure
constexpr double kFadeNs = 2e9;  // after the first
constexpr std::uint32_t kDoublingsMax = 6;

}  // namespace

bool is_the_routes_own(ErrorCode code) noexcept {
  return code == ErrorCode::kUnsupported || code == ErrorCode::kRouteFailed || code == ErrorCode::kOutOfMemory;
}

void RouteHealth::failed(const Error& why, std::int64_t began_ns, std::int64_t now_ns) noexcept {
  if (!is_the_routes_own(why.code())) return;
  const std::lock_guard lock(mutex_);
  ++failures_;
  try {
    why_ = why.what();
  } catch (const std::bad_alloc&) {
    why_.clear();
  }
  if (why.code() == ErrorCode::kUnsupported) unable_.store(true, std::memory_order_relaxed);
  // Writes that were under way together fail together: that is one failure, not a row of them.
  const std::uint32_t row = in_a_row_.load(std::memory_order_relaxed);
  if (row == 0 || began_ns >= failed_ns_.load(std::memory_order_relaxed)) {
    in_a_row_.store(row + 1, std::memory_order_relaxed);
  }
  failed_ns_.store(now_ns, std::memory_order_relaxed);
}

void RouteHealth::worked(std::int64_t began_ns) noexcept {
  if (in_a_row_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(mutex_);
  if (began_ns < failed_ns_.load(std::memory_order_relaxed)) return;
  in_a_row_.store(0, std::memory_order_relaxed);
  unable_.store(false, std::memory_order_relaxed);  // as the only one left it was asked, and could after all
}

double RouteHealth::factor(std::int64_t now_ns) const noexcept {
  const std::uint32_t row = in_a_row_.load(std::memory_order_relaxed);
  if (row == 0) return 1;
  if (!able()) return std::exp(kDearer);
  const auto age_ns =
      static_cast<double>(std::max<std::int64_t>(now_ns - failed_ns_.load(std::memory_order_relaxed), 0));
  const double fade_ns = kFadeNs * static_cast<double>(1U << std::min(row - 1, kDoublingsMax));
  return std::exp(kDearer * std::exp(-age_ns / fade_ns));
}

std::optional<RouteHealth::Report> RouteHealth::report() const {
  if (in_a_row_.load(std::memory_order_relaxed) == 0) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return Report{failures_, able(), why_};
}

}  // namespace kvpool
