#include "kvpool/exec/completion.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "kvpool/base/check.h"

namespace kvpool {
namespace {

void signal_event(int event) noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(write(event, &one, sizeof(one)));
}

}  // namespace

Completion::~Completion() {
  if (event_ >= 0) close(event_);
}

void Completion::finish(std::optional<Error> error) noexcept {
  KVPOOL_CHECK(!done());
  error_ = std::move(error);
  {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    if (event_ >= 0) signal_event(event_);
    ended_.notify_all();
  }
}

void Completion::sleep_until(std::int64_t until_ns) {
  // The steady clock is CLOCK_MONOTONIC.
  const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(until_ns)};
  std::unique_lock lock(mutex_);
  ended_.wait_until(lock, until, [this] { return done(); });
}

int Completion::descriptor() {
  const std::lock_guard lock(mutex_);
  if (event_ < 0) {
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0) throw Error(ErrorCode::kState, "no descriptor left to wait with");
    if (done()) signal_event(event_);
  }
  return event_;
}

}  // namespace kvpool
