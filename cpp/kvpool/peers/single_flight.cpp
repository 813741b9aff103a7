#include "kvpool/peers/single_flight.h"

#include <chrono>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/net/reactor.h"

namespace kvpool {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;  // CLOCK_MONOTONIC

}  // namespace

void SingleFlight::run(const std::string& name, const Waiting& waiting, const std::function<void()>& attempt) {
  for (;;) {
    std::shared_ptr<Attempt> shared;
    bool mine = false;
    {
      const std::lock_guard lock(mutex_);
      std::shared_ptr<Attempt>& entry = under_way_[name];
      if (entry == nullptr) {
        entry = std::make_shared<Attempt>();
        mine = true;
      }
      shared = entry;
    }
    if (mine) return lead(name, shared, waiting, attempt);
    if (follow(name, *shared, waiting)) return;
  }
}

void SingleFlight::lead(const std::string& name, const std::shared_ptr<Attempt>& mine, const Waiting& waiting,
                        const std::function<void()>& attempt) {
  const std::optional<Error> failure = failure_of(attempt);
  {
    const std::lock_guard lock(mutex_);
    under_way_.erase(name);
    mine->over = true;
    mine->given_up = failure && (failure->code() == ErrorCode::kCancelled || monotonic_ns() >= waiting.until_ns);
    mine->failure = failure;
    mine->ended.notify_all();
  }
  if (failure) throw Error(*failure);
}

// Whether it went well; false when it was given up.
bool SingleFlight::follow(const std::string& name, Attempt& other, const Waiting& waiting) {
  std::unique_lock lock(mutex_);
  while (!other.over) {
    const std::int64_t now = monotonic_ns();
    if (now >= waiting.until_ns) {
      throw Error(ErrorCode::kPeerLost, "peer " + name + " was not met in time: another call is still trying");
    }
    const SteadyTime until{std::chrono::nanoseconds(waiting.slice_ns(now))};
    other.ended.wait_until(lock, until, [&] { return other.over; });
    if (other.over) break;
    lock.unlock();
    waiting.check();  // asks Python, perhaps
    lock.lock();
  }
  if (other.given_up) return false;
  if (other.failure) throw Error(*other.failure);
  return true;
}

}  // namespace kvpool
