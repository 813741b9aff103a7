#include "kvpool/routes/ucx/ucx_progress.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <system_error>

#include "kvpool/base/error.h"
#include "kvpool/base/event_loop.h"
#include "kvpool/base/signals_blocked.h"

namespace kvpool {
namespace {

void signal_eventfd(int fd) noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(fd, &one, sizeof(one));  // fails only when it is readable anyway
}

}  // namespace

UcxProgress::UcxProgress() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN;
  if (epoll_ >= 0 && wake_ >= 0 && epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) == 0) {
    const SignalsBlocked blocked;
    try {
      thread_ = std::make_unique<std::thread>([this] { run(); });
    } catch (const std::system_error&) {
    }
  }
  if (thread_ == nullptr) {
    if (epoll_ >= 0) close(epoll_);
    if (wake_ >= 0) close(wake_);
    throw Error(ErrorCode::kState, "no thread or descriptor is left for UCX");
  }
  pthread_setname_np(thread_->native_handle(), "kvpool-ucx");
}

UcxProgress::~UcxProgress() {
  if (thread_ == nullptr) return;
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  signal_eventfd(wake_);
  thread_->join();
  close(epoll_);
  close(wake_);
}

// The thread exists in the parent only: its object is forgotten, not joined.
void UcxProgress::abandon() noexcept { static_cast<void>(thread_.release()); }

std::uint64_t UcxProgress::add(int fd, std::function<void()> serve) {
  std::uint64_t watch = 0;
  {
    const std::scoped_lock lock(mutex_);
    watch = ++last_;
    watches_.emplace(watch, Watch{fd, std::move(serve)});
  }
  epoll_event event{};
  event.events = EPOLLONESHOT;  // nothing yet: rearm() asks for more
  event.data.u64 = watch;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
    const std::scoped_lock lock(mutex_);
    watches_.erase(watch);
    throw Error(ErrorCode::kState, "UCX's event descriptor cannot be watched");
  }
  signal_eventfd(wake_);
  return watch;
}

void UcxProgress::rearm(std::uint64_t watch) noexcept {
  const std::scoped_lock lock(mutex_);
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.u64 = watch;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, found->second.fd, &event);
}

void UcxProgress::kick(std::uint64_t watch) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    const auto found = watches_.find(watch);
    if (found == watches_.end()) return;
    found->second.kicked = true;
  }
  signal_eventfd(wake_);
}

std::uint64_t UcxProgress::next_kicked() noexcept {
  const std::scoped_lock lock(mutex_);
  for (auto& [watch, what] : watches_) {
    if (what.kicked) {
      what.kicked = false;
      return watch;
    }
  }
  return 0;
}

void UcxProgress::remove(std::uint64_t watch) noexcept {
  std::unique_lock lock(mutex_);
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, found->second.fd, nullptr);
  served_.wait(lock, [&] { return serving_ != watch; });
  watches_.erase(watch);
}

void UcxProgress::serve(std::uint64_t watch) noexcept {
  std::function<void()>* call = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = watches_.find(watch);
    if (found == watches_.end()) return;
    serving_ = watch;
    call = &found->second.serve;  // remove() waits; other watches that come and go do not move it
  }
  (*call)();
  {
    const std::scoped_lock lock(mutex_);
    serving_ = 0;
  }
  served_.notify_all();
}

void UcxProgress::run() noexcept {
  in_event_loop = true;
  std::array<epoll_event, 16> events{};
  for (;;) {
    const int n = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), -1);
    bool woken = false;
    for (int i = 0; i < n; ++i) {
      const std::uint64_t watch = events[static_cast<std::size_t>(i)].data.u64;
      if (watch == 0) {
        woken = true;
      } else {
        serve(watch);
      }
    }
    if (!woken) continue;
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = read(wake_, &count, sizeof(count));  // before the kicks that it stands for
    {
      const std::scoped_lock lock(mutex_);
      if (stop_) return;
    }
    // A watch that kicks itself while it is served waits for its turn behind the descriptors.
    std::uint64_t watch = next_kicked();
    for (std::size_t served = 0; watch != 0 && served < events.size(); ++served) {
      serve(watch);
      watch = next_kicked();
    }
    if (watch != 0) kick(watch);
  }
}

}  // namespace kvpool
