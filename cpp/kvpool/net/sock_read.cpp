// The role of the reader of a link: how the reactor and the threads that wait for an answer share it. The invariants
// stand in sock_link.h.
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "kvpool/base/clock.h"
#include "kvpool/net/sock_link.h"

namespace kvpool {
namespace {

constexpr std::int64_t kSpinNs = 50'000;
constexpr std::int64_t kSleepNsMax = 1'000'000'000;
// What the reactor reads from one link before it turns to the others.
constexpr int kFramesAtOnce = 16;
constexpr int kCallsAtOnce = 4;

thread_local int handling_depth = 0;

}  // namespace

// ---- the reactor

void SockLink::on_ready(std::uint32_t events) noexcept {
  if (!reactor_.running()) close(Error(ErrorCode::kPeerLost, "this side has stopped"));  // its last call
  if ((events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) writer_.flush();
  if (!take_role_for_reactor()) return;
  int frames = 0;
  for (int calls = 0; calls < kCallsAtOnce && frames < kFramesAtOnce; ++calls) {
    if (!step_while([&] { return ++frames >= 0; })) break;
    if (fill() != Read::kSome) break;
  }
  step_while([] { return true; });  // invariant 4
  give_up_role();
}

bool SockLink::take_role_for_reactor() noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_) return false;
  if (!reading_ && waiting_.load() == 0) {
    reading_ = true;
    return true;
  }
  // A driver reads, or is about to: input is not the reactor's business.
  driven_ = true;
  set_interest();
  if (!reading_) role_free_.notify_one();
  return false;
}

void SockLink::give_up_role() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!closing_.load(std::memory_order_relaxed)) {
      reading_ = false;
      hand_over_role();
      return;
    }
  }
  finish();
}

// Keeps invariant 3. REQUIRES: mutex_ is held.
void SockLink::hand_over_role() noexcept {
  if (reading_ || ended_) return;
  if (waiting_.load() > 0) {
    role_free_.notify_one();
    return;
  }
  driven_ = false;
  set_interest();
}

// REQUIRES: mutex_ is held.
void SockLink::set_interest() noexcept {
  if (watch_ == 0) return;
  std::uint32_t wanted = driven_ ? 0 : static_cast<std::uint32_t>(EPOLLIN | EPOLLRDHUP);
  if (room_wanted_) wanted |= EPOLLOUT;
  if (wanted == interest_) return;
  interest_ = wanted;
  reactor_.want(watch_, wanted);
}

// ---- one reader

class SockLink::Handling {
 public:
  Handling() noexcept { ++handling_depth; }
  ~Handling() { --handling_depth; }
  Handling(const Handling&) = delete;
  Handling& operator=(const Handling&) = delete;
};

bool SockLink::handling() noexcept { return handling_depth > 0; }

// Handles what is buffered, as long as go_on() after each frame. False: the link ends.
template <class GoOn>
bool SockLink::step_while(GoOn&& go_on) noexcept {
  const Handling here;
  try {
    while (!closing_.load(std::memory_order_acquire)) {
      if (!reader_.step() || !go_on()) return !closing_.load(std::memory_order_acquire);
    }
  } catch (const Error& error) {
    close_with(error, Farewell::kBye);
  } catch (const std::bad_alloc&) {
    close_with(Error(ErrorCode::kOutOfMemory, "no memory to handle what the peer sent"), Farewell::kBye);
  } catch (const std::exception& error) {
    close_with(Error(ErrorCode::kProtocol, error.what()), Farewell::kBye);
  } catch (...) {
    close_with(Error(ErrorCode::kProtocol, "what the peer sent could not be handled"), Farewell::kBye);
  }
  return false;
}

SockLink::Read SockLink::fill() noexcept {
  try {
    switch (reader_.fill()) {
      case FrameReader::Filled::kBytes:
        heard_ns_.store(monotonic_ns(), std::memory_order_relaxed);
        return Read::kSome;
      case FrameReader::Filled::kNothing:
        // All that the peer sent before the connection broke has been read.
        if (!writer_.broken()) return Read::kNothing;
        close_with(Error(ErrorCode::kPeerLost, "the connection broke"), Farewell::kNone);
        return Read::kOver;
      case FrameReader::Filled::kEnd:
        close_with(Error(ErrorCode::kPeerLost, "the peer closed the connection"), Farewell::kNone);
        return Read::kOver;
    }
  } catch (const Error& error) {
    close_with(error, Farewell::kBye);
  } catch (...) {
    close_with(Error(ErrorCode::kOutOfMemory, "no memory to read what the peer sends"), Farewell::kBye);
  }
  return Read::kOver;
}

// ---- drivers

// Gives the role up however the scope is left.
class SockLink::RoleGuard {
 public:
  explicit RoleGuard(SockLink& link) noexcept : link_(link) {}
  ~RoleGuard() {
    link_.step_while([] { return true; });  // invariant 4
    link_.give_up_role();
  }
  RoleGuard(const RoleGuard&) = delete;
  RoleGuard& operator=(const RoleGuard&) = delete;

 private:
  SockLink& link_;
};

// A driver that waited for the role may have been notified that the role is free. Unless it took the role, somebody
// else has to: invariant 3. The reactor may have stopped since, and have left the end of the link to this driver.
class SockLink::Waiter {
 public:
  explicit Waiter(SockLink& link) noexcept : link_(link) {}
  ~Waiter() {
    if (!notified_) return;
    std::unique_lock lock(link_.mutex_);
    if (!link_.closing() || link_.reading_ || link_.ended_) {
      link_.hand_over_role();
      return;
    }
    link_.reading_ = true;
    lock.unlock();
    link_.finish();
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // Until the role is free, the link ended, a wake() came that was not seen yet, or the deadline. REQUIRES: `lock`
  // holds mutex_.
  void wait(std::unique_lock<std::mutex>& lock, std::int64_t deadline_ns, std::uint64_t seen) {
    const auto rest = std::clamp<std::int64_t>(deadline_ns - monotonic_ns(), 0, kSleepNsMax);
    notified_ = true;
    link_.waiting_.fetch_add(1);
    link_.role_free_.wait_for(lock, std::chrono::nanoseconds(rest),
                              [&] { return !link_.reading_ || link_.ended_ || link_.wakes_.load() != seen; });
    link_.waiting_.fetch_sub(1);
  }
  void took_role() noexcept { notified_ = false; }

 private:
  SockLink& link_;
  bool notified_ = false;
};

bool SockLink::drive(std::int64_t deadline_ns, const std::function<bool()>& done) {
  if (forked() || reactor_.in_thread()) return done();
  const auto keep = shared_from_this();  // what is handled may drop the last other owner
  Waiter waiter(*this);
  while (true) {
    const std::uint64_t seen = wakes_.load();
    if (done()) return true;
    std::unique_lock lock(mutex_);
    if (ended_) break;
    if (reading_) {
      if (monotonic_ns() >= deadline_ns) break;
      waiter.wait(lock, deadline_ns, seen);
      continue;
    }
    reading_ = driven_ = true;
    waiter.took_role();
    set_interest();
    lock.unlock();
    {
      const RoleGuard guard(*this);
      if (read_until(deadline_ns, done)) return true;
    }
    if (!closing()) break;  // the deadline. Else go on until on_closed has come
  }
  return done();
}

bool SockLink::read_until(std::int64_t deadline_ns, const std::function<bool()>& done) {
  std::int64_t spin_until = monotonic_ns() + kSpinNs;
  std::uint64_t seen = wakes_.load();
  if (done()) return true;
  while (true) {
    bool is_done = false;
    if (!step_while([&] { return !(is_done = done()); })) return false;
    if (is_done) return true;
    if (const std::uint64_t wakes = wakes_.load(); wakes != seen) {
      seen = wakes;
      if (done()) return true;
    }
    switch (fill()) {
      case Read::kOver:
        return false;
      case Read::kSome:
        spin_until = monotonic_ns() + kSpinNs;
        if (spin_until - kSpinNs >= deadline_ns) return false;
        continue;
      case Read::kNothing:
        break;
    }
    const std::int64_t now = monotonic_ns();
    if (now >= deadline_ns) return false;
    if (now < spin_until) {
      sched_yield();  // there may be fewer processors than threads that spin
    } else {
      sleep_until(deadline_ns, seen);
    }
  }
}

// Until there is input, a wake() that was not seen yet, or the deadline.
void SockLink::sleep_until(std::int64_t deadline_ns, std::uint64_t seen) noexcept {
  sleeping_.store(true);
  if (wakes_.load() == seen && !closing()) {
    pollfd watched[] = {{socket_.get(), POLLIN | POLLRDHUP, 0}, {wake_.get(), POLLIN, 0}};
    const std::int64_t rest = std::clamp<std::int64_t>(deadline_ns - monotonic_ns(), 0, kSleepNsMax);
    const timespec wait{rest / 1'000'000'000, rest % 1'000'000'000};
    ppoll(watched, 2, &wait, nullptr);
    if (watched[1].revents != 0) {
      std::uint64_t ignored = 0;
      [[maybe_unused]] const auto got = ::read(wake_.get(), &ignored, sizeof(ignored));
    }
  }
  sleeping_.store(false);
}

void SockLink::wake() noexcept {
  if (forked()) return;
  wakes_.fetch_add(1);
  // Either the driver sees the new count before it sleeps, or it is seen here to sleep: both are sequentially
  // consistent.
  if (sleeping_.load()) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
  }
  if (waiting_.load() > 0) {
    const std::lock_guard lock(mutex_);
    role_free_.notify_all();
  }
}

}  // namespace kvpool
