#include "kvpool/base/heartbeat.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <chrono>
#include <string>
#include <system_error>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/base/signals_blocked.h"

namespace kvpool {
namespace {

std::int64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

std::int64_t* map_page(int descriptor) {
  void* page = mmap(nullptr, Heartbeat::kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (page == MAP_FAILED) {
    throw Error(ErrorCode::kUnsupported, std::string("a heartbeat's page cannot be mapped: ") + strerror(errno),
                {{"errno", errno}});
  }
  // A child that had the page would keep the file open, and with it the lock that tells of its parent's life.
  madvise(page, Heartbeat::kPageBytes, MADV_DONTFORK);
  return static_cast<std::int64_t*>(page);
}

}  // namespace

Heartbeat::Heartbeat(int descriptor, std::int64_t interval_ns, std::int64_t lease_ns)
    : interval_ns_(interval_ns), lease_ns_(lease_ns), page_(map_page(descriptor)) {
  KVPOOL_CHECK(interval_ns > 0 && interval_ns < lease_ns);
  word(0).store(now_ns(), std::memory_order_release);
  const SignalsBlocked blocked;
  try {
    running_->thread = std::thread([this] { loop(); });
    pthread_setname_np(running_->thread.native_handle(), "kvpool-beat");
  } catch (const std::system_error& error) {
    munmap(page_, kPageBytes);
    throw Error(ErrorCode::kUnsupported, std::string("a heartbeat's thread cannot be started: ") + error.what());
  }
}

Heartbeat::~Heartbeat() {
  if (forked()) {
    static_cast<void>(running_.release());
    return;
  }
  stop();
  munmap(page_, kPageBytes);
}

void Heartbeat::stop() noexcept {
  if (forked()) return;
  std::thread ended;
  {
    const std::lock_guard lock(running_->mutex);
    running_->stopping = true;
    running_->wake.notify_one();
    ended.swap(running_->thread);
  }
  if (ended.joinable()) ended.join();
}

std::atomic_ref<std::int64_t> Heartbeat::word(std::size_t index) const noexcept {
  return std::atomic_ref<std::int64_t>(page_[index]);
}

std::int64_t Heartbeat::beat_ns() const noexcept { return forked() ? 0 : word(0).load(std::memory_order_acquire); }
std::int64_t Heartbeat::lapses() const noexcept { return forked() ? 0 : word(1).load(std::memory_order_acquire); }

bool Heartbeat::fresh() const noexcept {
  if (forked()) return false;  // and not by the clock: 0 is younger than a lease on a machine that has just started
  const std::int64_t now = now_ns();
  return now - beat_ns() <= lease_ns_;
}

void Heartbeat::beat() noexcept {
  const std::int64_t before = word(0).load(std::memory_order_relaxed);
  // Counted before the new beat can be seen, so that nobody sees a fresh beat without its lapse; and looked at again
  // after it, because the thread may have been held up between the clock and the store.
  const bool late = now_ns() - before > lease_ns_;
  if (late) word(1).fetch_add(1, std::memory_order_release);
  word(0).store(now_ns(), std::memory_order_seq_cst);
  if (!late && now_ns() - before > lease_ns_) word(1).fetch_add(1, std::memory_order_release);
}

void Heartbeat::loop() noexcept {
  std::unique_lock lock(running_->mutex);
  while (!running_->stopping) {
    running_->wake.wait_for(lock, std::chrono::nanoseconds(interval_ns_));
    beat();
  }
}

}  // namespace kvpool
