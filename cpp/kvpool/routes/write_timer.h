// Measures the time of one write for the cost of its route.
#pragma once

#include <cstdint>

#include "kvpool/base/clock.h"
#include "kvpool/routes/route.h"
#include "kvpool/routes/route_cost.h"

namespace kvpool {

// Starts when it is made. Writes that throw are not recorded, because they say nothing about the cost of successful
// ones.
class WriteTimer {
 public:
  WriteTimer(RouteCost& cost, const WriteRequest& request) noexcept
      : cost_(cost), request_(request), began_ns_(monotonic_ns()) {}

  // Call when the write has ended. Records the time, and returns the microseconds since the start.
  double stop(const WriteOutcome& outcome) noexcept {
    const std::int64_t now_ns = monotonic_ns();
    const double us = static_cast<double>(now_ns - began_ns_) / 1e3;
    const WriteSize size{outcome.pieces, outcome.bytes, request_.gather};
    cost_.measured(media_set_of(request_.from), media_set_of(request_.to), size, us, now_ns);
    return us;
  }

 private:
  RouteCost& cost_;
  const WriteRequest& request_;
  const std::int64_t began_ns_;
};

}  // namespace kvpool
