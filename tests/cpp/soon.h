// Waits for what another thread, or another process, is about to do.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "kvpool/base/clock.h"

namespace kvpool::testing {

// Looks again and again, for at most a minute.
template <class Condition>
bool soon(Condition&& condition) {
  for (const std::int64_t until = monotonic_ns() + 60'000'000'000; monotonic_ns() < until;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

}  // namespace kvpool::testing
