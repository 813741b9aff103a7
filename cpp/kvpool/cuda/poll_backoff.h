// Paces a loop that polls the GPU: first without pauses, then with short sleeps.
//
// Thread-safety: none; for one thread, on its stack.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

namespace kvpool {

class PollBackoff {
 public:
  // CLOCK_MONOTONIC.
  static std::int64_t now_ns() noexcept {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
  }

  // Call it between two polls. `now_ns`: the time of the last poll.
  void pause(std::int64_t now_ns) const noexcept {
    constexpr std::int64_t kSpinNs = 50'000;
    constexpr long kPauseNs = 50'000;
    if (now_ns - began_ns_ < kSpinNs) {
      sched_yield();
    } else {
      const timespec pause{0, kPauseNs};
      nanosleep(&pause, nullptr);
    }
  }
  std::int64_t began_ns() const noexcept { return began_ns_; }

 private:
  const std::int64_t began_ns_ = now_ns();
};

}  // namespace kvpool
