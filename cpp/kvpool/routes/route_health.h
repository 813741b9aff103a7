// Judges whether a route to a peer works, by the outcome of its writes.
//
// RouteCost learns from successful writes only. A route that fails at once would still look cheap, and every transfer
// would fail on it. So a failure caused by the route makes the route avoided, with exponential backoff: any other route
// is preferred meanwhile, then one transfer or a few try it again. A route that reports kUnsupported is the last choice
// for this peer.
//
//   failures in a row    time constant of the fading
//   1, 2, 3, ... 7       2 s, 4 s, 8 s, ... 128 s
//
// Not caused by the route: the peer's death, the caller's deadline, cancellation and arguments, the peer's refusal.
//
// Thread-safety: all of it. Any monotonic clock may provide now_ns.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {

// Whether the route caused a failure with this code.
bool is_the_routes_own(ErrorCode code) noexcept;

class RouteHealth {
 public:
  // Records that a write which began then has failed. Failures not caused by the route change nothing.
  void failed(const Error& why, std::int64_t began_ns, std::int64_t now_ns) noexcept;
  // Records that a write which began then succeeded. If it began before the last failure, it changes nothing.
  void worked(std::int64_t began_ns) noexcept;

  // False: the route has reported that it cannot write to this peer (kUnsupported).
  bool able() const noexcept { return !unable_.load(std::memory_order_relaxed); }
  // The factor on a write's estimate: 1 or more.
  double factor(std::int64_t now_ns) const noexcept;

  struct Report {
    std::uint64_t failures = 0;  // all failures of this route
    bool able = true;
    std::string why;  // the last one
  };
  // Empty if the route has not failed, or has worked since.
  std::optional<Report> report() const;

 private:
  std::atomic<bool> unable_{false};
  std::atomic<std::uint32_t> in_a_row_{0};  // 0: works
  std::atomic<std::int64_t> failed_ns_{0};  // when the last one ended
  mutable std::mutex mutex_;                // guards the members below, and changes of those above
  std::uint64_t failures_ = 0;
  std::string why_;
};

// The failures of a route, for the application.
struct RouteFailure {
  std::string route;
  RouteHealth::Report report;
};

}  // namespace kvpool
