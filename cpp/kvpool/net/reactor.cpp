#include "kvpool/net/reactor.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>

#include <cerrno>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/base/signals_blocked.h"
#include "kvpool/net/reactor_loop.h"

namespace kvpool {

namespace {

thread_local const ReactorState* thread_of = nullptr;

void* run_thread(void* argument) {
  auto* state = static_cast<ReactorState*>(argument);
  thread_of = state;
  run_reactor(*state);
  return nullptr;
}

[[noreturn]] void fail_errno(const char* what, int error) {
  throw Error(ErrorCode::kState,
              std::string("the kernel gives no ") + what + ": " + std::generic_category().message(error),
              {{"errno", error}});
}

// REQUIRES: the state's mutex is held.
void check_open(const ReactorState& state) {
  if (state.over) throw Error(ErrorCode::kClosed, "the reactor was stopped");
}

// Waits until this callback does not run, unless this is its thread. REQUIRES: `lock` holds the state's mutex.
void wait_while_running(ReactorState& state, std::uint64_t id, std::unique_lock<std::mutex>& lock) noexcept {
  if (thread_of == &state) return;
  state.callback_over.wait(lock, [&] { return state.running_id != id; });
}

}  // namespace

Reactor::Reactor(const char* thread_name) : state_(std::make_unique<ReactorState>()), born_(fork_generation()) {
  ReactorState& s = *state_;
  s.epoll = Descriptor::open([] { return epoll_create1(EPOLL_CLOEXEC); });
  if (!s.epoll) fail_errno("epoll descriptor", errno);
  s.wake = Descriptor::open([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!s.wake) fail_errno("eventfd", errno);
  epoll_event event{EPOLLIN, {.u64 = kReactorWakeId}};
  if (epoll_ctl(s.epoll.get(), EPOLL_CTL_ADD, s.wake.get(), &event) != 0) fail_errno("epoll entry", errno);
  start_thread(thread_name);
}

Reactor::~Reactor() {
  if (forked()) {
    static_cast<void>(state_.release());  // the parent's: its locks may be held for ever
    return;
  }
  KVPOOL_CHECK(!in_thread());
  stop();
}

std::uint64_t Reactor::watch(int fd, std::function<void(std::uint32_t)> ready) {
  check_usable();
  auto added = std::make_shared<ReactorWatch>(ReactorWatch{fd, std::move(ready)});
  const std::lock_guard lock(state_->mutex);
  check_open(*state_);
  const std::uint64_t id = ++state_->last_id;
  state_->watches.emplace(id, std::move(added));
  epoll_event event{EPOLLIN | EPOLLRDHUP, {.u64 = id}};
  if (epoll_ctl(state_->epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    const int error = errno;
    state_->watches.erase(id);
    fail_errno("epoll entry", error);
  }
  return id;
}

void Reactor::unwatch(std::uint64_t watch) noexcept {
  if (forked()) return;
  std::shared_ptr<ReactorWatch> removed;  // destroyed without the lock
  std::unique_lock lock(state_->mutex);
  if (const auto found = state_->watches.find(watch); found != state_->watches.end()) {
    removed = std::move(found->second);
    state_->watches.erase(found);
    epoll_ctl(state_->epoll.get(), EPOLL_CTL_DEL, removed->fd, nullptr);
  }
  wait_while_running(*state_, watch, lock);
}

void Reactor::want(std::uint64_t watch, std::uint32_t events) noexcept {
  if (forked()) return;
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->watches.find(watch);
  if (found == state_->watches.end()) return;
  // EPOLLHUP and EPOLLERR cannot be unwanted; with EPOLLONESHOT they come once at most, and do not wake us for ever.
  epoll_event event{events != 0 ? events : static_cast<std::uint32_t>(EPOLLONESHOT), {.u64 = watch}};
  epoll_ctl(state_->epoll.get(), EPOLL_CTL_MOD, found->second->fd, &event);
}

void Reactor::post(std::function<void()> work) {
  check_usable();
  std::unique_lock lock(state_->mutex);
  check_open(*state_);
  state_->posted.push_back(std::move(work));
  state_->wake_thread(lock);
}

std::uint64_t Reactor::at(std::int64_t at_ns, std::function<void()> work) {
  check_usable();
  std::unique_lock lock(state_->mutex);
  check_open(*state_);
  const std::uint64_t id = ++state_->last_id;
  state_->timer_times.emplace(id, at_ns);
  try {
    state_->timers.emplace(std::pair(at_ns, id), std::move(work));
  } catch (...) {
    state_->timer_times.erase(id);
    throw;
  }
  if (waking_time(at_ns) < state_->sleeping_until) state_->wake_thread(lock);
  return id;
}

void Reactor::cancel(std::uint64_t timer) noexcept {
  if (forked()) return;
  decltype(state_->timers)::node_type removed;  // destroyed without the lock
  std::unique_lock lock(state_->mutex);
  if (const auto found = state_->timer_times.find(timer); found != state_->timer_times.end()) {
    removed = state_->timers.extract({found->second, timer});
    state_->timer_times.erase(found);
  }
  wait_while_running(*state_, timer, lock);
}

void Reactor::wait_for_callback() noexcept {
  if (forked() || in_thread()) return;
  std::unique_lock lock(state_->mutex);
  const std::uint64_t calls = state_->calls;
  state_->callback_over.wait(lock, [&] { return state_->running_id == 0 || state_->calls != calls; });
}
bool Reactor::in_thread() const noexcept { return thread_of == state_.get(); }
bool Reactor::running() const noexcept { return !forked() && state_->running.load(); }
std::uint64_t Reactor::wakeups() const noexcept { return state_->wakeups.load(std::memory_order_relaxed); }

void Reactor::stop() noexcept {
  if (forked() || in_thread()) return;
  const std::lock_guard once(stop_mutex_);
  if (stopped_) return;
  {
    std::unique_lock lock(state_->mutex);
    state_->stopping = true;
    state_->wake_thread(lock);
  }
  pthread_join(state_->thread, nullptr);
  stopped_ = true;
  close_descriptors();
}

bool Reactor::forked() const noexcept { return fork_generation() != born_; }
void Reactor::check_usable() const {
  if (forked()) throw Error(ErrorCode::kFork, "a reactor belongs to the process that made it");
}

// The reactor may live on for long: the service of an attach that failed is kept until its pool is closed.
void Reactor::close_descriptors() noexcept {
  while (state_->waking.load(std::memory_order_acquire) != 0) sched_yield();
  const std::lock_guard lock(state_->mutex);
  state_->epoll.reset();
  state_->wake.reset();
}

void Reactor::start_thread(const char* name) {
  const SignalsBlocked blocked;
  const int error = pthread_create(&state_->thread, nullptr, run_thread, state_.get());
  if (error != 0) fail_errno("thread", error);
  pthread_setname_np(state_->thread, std::string(name).substr(0, 15).c_str());
}

}  // namespace kvpool
