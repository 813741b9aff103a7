#include "kvpool/disk/crew.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "kvpool/base/signals_blocked.h"

namespace kvpool {

bool Crew::start(std::function<void()> work) noexcept {
  {
    const std::lock_guard lock(count_->mutex);
    ++count_->running;
  }
  try {
    const SignalsBlocked blocked;
    std::thread([count = count_, work = std::move(work)]() mutable {
      work();
      work = nullptr;  // what it kept is gone when it counts as ended
      const std::lock_guard lock(count->mutex);
      --count->running;
      count->ended.notify_all();
    }).detach();
    return true;
  } catch (const std::exception&) {
    const std::lock_guard lock(count_->mutex);
    --count_->running;
    return false;
  }
}

std::size_t Crew::size() const {
  const std::lock_guard lock(count_->mutex);
  return count_->running;
}

bool Crew::wait_until(std::int64_t until_ns) {
  const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(until_ns)};
  std::unique_lock lock(count_->mutex);
  return count_->ended.wait_until(lock, until, [this] { return count_->running == 0; });
}

}  // namespace kvpool
