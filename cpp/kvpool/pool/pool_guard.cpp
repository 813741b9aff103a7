#include "kvpool/pool/pool_guard.h"

#include "kvpool/base/fork_guard.h"

namespace kvpool {

PoolGuard::PoolGuard() noexcept : made_in_(fork_generation()) {}

bool PoolGuard::in_child() const noexcept { return made_in_ != fork_generation(); }

void PoolGuard::check_process() const {
  if (in_child()) [[unlikely]] {
    throw Error(ErrorCode::kFork, "this pool belongs to the parent process: make a new one after fork");
  }
}

void PoolGuard::check_open() const {
  check_process();
  if (closed()) [[unlikely]] {
    throw Error(ErrorCode::kClosed, "the pool is closed");
  }
}

void PoolGuard::fail(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  why_failed_ = why;
  failed_.store(true, std::memory_order_release);
  if (observer_ != nullptr) observer_->on_pool_failed(why);
}

std::optional<Error> PoolGuard::failure() {
  const std::lock_guard lock(mutex_);
  return why_failed_;
}

void PoolGuard::observe(PoolObserver* observer) {
  const std::lock_guard closing(closing_);
  const std::lock_guard lock(mutex_);
  observer_ = observer;
}

void PoolGuard::tell_closing() noexcept {
  const std::lock_guard closing(closing_);
  if (observer_ != nullptr) observer_->on_pool_closing();
}

}  // namespace kvpool
