// How long a call may wait, and whether its caller has given up.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {

// The waiting thread calls it several times a second. Returns true if the caller gives up (Ctrl-C). Empty: the wait
// cannot be given up.
using GivenUp = std::function<bool()>;

struct Waiting {
  // A time of CLOCK_MONOTONIC is a whole Waiting for most callers.
  Waiting(std::int64_t until) noexcept : until_ns(until) {}  // NOLINT(google-explicit-constructor)
  Waiting(std::int64_t until, GivenUp asked) : until_ns(until), given_up(std::move(asked)) {}

  // The time at which to check given_up again.
  std::int64_t slice_ns(std::int64_t now_ns) const noexcept {
    constexpr std::int64_t kSliceNs = 100'000'000;
    return given_up && now_ns < until_ns - kSliceNs ? now_ns + kSliceNs : until_ns;
  }
  // Throws kCancelled.
  void check() const {
    if (given_up && given_up()) throw Error(ErrorCode::kCancelled, "the caller has given up waiting");
  }

  std::int64_t until_ns;
  GivenUp given_up;
};

}  // namespace kvpool
