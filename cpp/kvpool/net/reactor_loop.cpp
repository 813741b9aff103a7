#include "kvpool/net/reactor_loop.h"

#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "kvpool/base/clock.h"
#include "kvpool/base/event_loop.h"
#include "kvpool/net/reactor.h"

namespace kvpool {
namespace {

constexpr std::int64_t kSpinNs = 50'000;
// A sleeping reactor wakes for timers only at multiples of this.
constexpr std::int64_t kTimerGridNs = 20'000'000;
constexpr int kEventsMax = 64;

// The thread's side.
class Loop {
 public:
  explicit Loop(ReactorState& state) noexcept : s_(state) {}

  void run() noexcept {
    std::int64_t spin_until = 0;
    while (true) {
      const bool spinning = monotonic_ns() < spin_until;
      const int events = wait(spinning);
      bool active = dispatch(events);
      active = run_posted() || active;
      active = run_timers() || active;
      if (active) {
        spin_until = monotonic_ns() + kSpinNs;
      } else if (spinning) {
        sched_yield();  // there may be fewer processors than threads that spin
      }
      const std::lock_guard lock(s_.mutex);
      if (s_.stopping) break;
    }
    finish();
  }

 private:
  int wait(bool spinning) noexcept {
    int timeout_ms = 0;
    if (!spinning) {
      const std::lock_guard lock(s_.mutex);
      timeout_ms = sleep_ms();
      s_.sleeping = timeout_ms != 0;
    }
    const int count = epoll_wait(s_.epoll.get(), events_, kEventsMax, timeout_ms);
    if (timeout_ms != 0) {
      s_.wakeups.fetch_add(1, std::memory_order_relaxed);
      const std::lock_guard lock(s_.mutex);
      s_.sleeping = false;
    }
    return count;  // negative after EINTR, as when nothing happened
  }

  // REQUIRES: mutex is held.
  int sleep_ms() noexcept {
    if (s_.stopping || !s_.posted.empty()) return 0;
    s_.sleeping_until = INT64_MAX;
    if (s_.timers.empty()) return -1;
    const std::int64_t now = monotonic_ns();
    const std::int64_t first = s_.timers.begin()->first.first;
    if (first <= now) return 0;
    s_.sleeping_until = waking_time(first);
    const std::int64_t ms = (s_.sleeping_until - now + 999'999) / 1'000'000;
    return ms > 3'600'000 ? 3'600'000 : static_cast<int>(ms);
  }

  bool dispatch(int count) noexcept {
    for (int i = 0; i < count; ++i) {
      if (events_[i].data.u64 == kReactorWakeId) {
        std::uint64_t ignored = 0;
        [[maybe_unused]] const auto got = read(s_.wake.get(), &ignored, sizeof(ignored));
      } else {
        call_watch(events_[i].data.u64, events_[i].events);
      }
    }
    return count > 0;
  }

  void call_watch(std::uint64_t id, std::uint32_t events) noexcept {
    std::shared_ptr<ReactorWatch> watch;
    {
      const std::lock_guard lock(s_.mutex);
      const auto found = s_.watches.find(id);
      if (found == s_.watches.end()) return;  // removed since the kernel told of it
      watch = found->second;
      s_.running_id = id;
    }
    const bool threw = !call([&] { watch->ready(events); });
    {
      const std::lock_guard lock(s_.mutex);
      if (threw && s_.watches.contains(id)) {
        epoll_event nothing{EPOLLONESHOT, {.u64 = id}};
        epoll_ctl(s_.epoll.get(), EPOLL_CTL_MOD, watch->fd, &nothing);
      }
      s_.running_id = 0;
      ++s_.calls;
    }
    s_.callback_over.notify_all();
  }

  bool run_posted() noexcept {
    std::vector<std::function<void()>> work;
    {
      const std::lock_guard lock(s_.mutex);
      work.swap(s_.posted);
    }
    for (const auto& item : work) call(item);
    return !work.empty();
  }

  bool run_timers() noexcept {
    bool ran = false;
    const std::int64_t now = monotonic_ns();
    while (true) {
      std::function<void()> work;
      {
        const std::lock_guard lock(s_.mutex);
        if (s_.timers.empty() || s_.timers.begin()->first.first > now) break;
        auto timer = s_.timers.extract(s_.timers.begin());
        s_.timer_times.erase(timer.key().second);
        s_.running_id = timer.key().second;
        work = std::move(timer.mapped());
      }
      call(work);
      ran = true;
      {
        const std::lock_guard lock(s_.mutex);
        s_.running_id = 0;
        ++s_.calls;
      }
      s_.callback_over.notify_all();
    }
    return ran;
  }

  template <class Work>
  static bool call(Work&& work) noexcept {
    try {
      work();
      return true;
    } catch (...) {
      return false;
    }
  }

  // Work that is posted until here runs, and what it posts; then nothing new is taken, and each watch is called once.
  void finish() noexcept {
    s_.running.store(false);
    for (bool over = false; !over;) {
      run_posted();
      const std::lock_guard lock(s_.mutex);
      s_.over = over = s_.posted.empty();
    }
    for (std::uint64_t id = next_watch(0); id != 0; id = next_watch(id)) call_watch(id, EPOLLHUP);
    decltype(s_.timers) dropped;  // destroyed without the lock: what they hold may call back
    const std::lock_guard lock(s_.mutex);
    dropped.swap(s_.timers);
    s_.timer_times.clear();
  }

  // The smallest id above this one, 0 for none. Slow, and allocates nothing.
  std::uint64_t next_watch(std::uint64_t above) noexcept {
    const std::lock_guard lock(s_.mutex);
    std::uint64_t next = 0;
    for (const auto& [id, watch] : s_.watches) {
      if (id > above && (next == 0 || id < next)) next = id;
    }
    return next;
  }

  ReactorState& s_;
  epoll_event events_[kEventsMax];
};

}  // namespace

void ReactorState::wake_thread(std::unique_lock<std::mutex>& lock) noexcept {
  const bool needed = std::exchange(sleeping, false);
  if (needed) waking.fetch_add(1, std::memory_order_relaxed);
  lock.unlock();
  if (!needed) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(wake.get(), &one, sizeof(one));  // full: it is readable already
  waking.fetch_sub(1, std::memory_order_release);
}

std::int64_t waking_time(std::int64_t at_ns) noexcept {
  return at_ns > INT64_MAX - kTimerGridNs ? INT64_MAX : (at_ns + kTimerGridNs - 1) / kTimerGridNs * kTimerGridNs;
}

void run_reactor(ReactorState& state) noexcept {
  in_event_loop = true;
  Loop(state).run();
}

}  // namespace kvpool
