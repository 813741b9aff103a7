// Waits for what another thread, or another process, is about to do.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "kvpool/base/clock.h"

namespace kvpool::testing {

// As a deadline: CLOCK_MONOTONIC.
inline std::int64_t in_seconds(double seconds) { return monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9); }

// Looks again and again, for at most a minute. Sleeps in between: a thread that yields in a loop takes the core from
// the thread that it waits for.
template <class Condition>
bool soon(Condition&& condition) {
  for (const std::int64_t until = monotonic_ns() + 60'000'000'000; monotonic_ns() < until;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return condition();
}

// The same in any thread, for what the test cannot go on without: that it never comes is a failure and not a hang.
template <class Condition>
void sleep_while(const Condition& holds) {
  if (soon([&] { return !holds(); })) return;
  std::fputs("a test waited for a minute for what never came\n", stderr);
  std::abort();
}

}  // namespace kvpool::testing
