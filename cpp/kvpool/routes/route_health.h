// Whether a route to a peer works, by how its writes have ended.
//
// RouteCost learns from writes that went well. A route that fails at once would look as cheap as ever, and take every
// transfer with it. So a failure that is the route's own makes it dearer, by so much that any other one serves
// meanwhile, for a time that doubles with each failure in a row; then it is tried again, by one transfer or a few. One
// that says that it cannot do it (kUnsupported) is out for this peer: it is asked when there is nothing else.
//
//   failures in a row    time constant of the fading
//   1, 2, 3, ... 7       2 s, 4 s, 8 s, ... 128 s
//
// What is not the route's own: the peer's death, the caller's deadline, cancellation and arguments, the peer's refusal.
//
// Thread-safety: all of it. The clock is whatever now_ns counts: it only rises.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {

// Of a failure, by its code.
bool is_the_routes_own(ErrorCode code) noexcept;

class RouteHealth {
 public:
  // A write that began then has failed. What is not the route's own changes nothing.
  void failed(const Error& why, std::int64_t began_ns, std::int64_t now_ns) noexcept;
  // A write that began then went well. One that began before the last failure proves nothing about what came after.
  void worked(std::int64_t began_ns) noexcept;

  // False: it cannot write to this peer, by its own word.
  bool able() const noexcept { return !unable_.load(std::memory_order_relaxed); }
  // By how much a write is dearer than its estimate: 1 and more.
  double factor(std::int64_t now_ns) const noexcept;

  struct Report {
    std::uint64_t failures = 0;  // of its own, ever
    bool able = true;
    std::string why;  // the last one
  };
  // Nothing when it has not failed, or has worked since.
  std::optional<Report> report() const;

 private:
  std::atomic<bool> unable_{false};
  std::atomic<std::uint32_t> in_a_row_{0};  // 0: nothing to look at
  std::atomic<std::int64_t> failed_ns_{0};  // when the last one ended
  mutable std::mutex mutex_;                // what follows, and changes of what stands above
  std::uint64_t failures_ = 0;
  std::string why_;
};

// Of a route by this name, for people.
struct RouteFailure {
  std::string route;
  RouteHealth::Report report;
};

}  // namespace kvpool
