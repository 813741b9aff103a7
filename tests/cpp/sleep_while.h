// Waiting for another thread of a test.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace kvpool {

// Sleeps in short pieces while this holds: a thread that yields in a loop takes the core from the thread that it waits
// for. Ends the process after two minutes, so that a condition that never changes is a failure and not a hang.
template <class Holds>
void sleep_while(const Holds& holds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (holds()) {
    if (std::chrono::steady_clock::now() > until) {
      std::fputs("a test waited for two minutes for what never came\n", stderr);
      std::abort();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace kvpool
