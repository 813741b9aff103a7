// The clock for deadlines and leases.
#pragma once

#include <time.h>

#include <cstdint>

namespace kvpool {

// CLOCK_MONOTONIC, in nanoseconds.
inline std::int64_t monotonic_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace kvpool
