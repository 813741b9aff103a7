#include "kvpool/cuda/word_alarm.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/signals_blocked.h"
#include "kvpool/cuda/poll_backoff.h"
#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

constexpr std::chrono::seconds kLinger{5};

struct Alarm {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::pair<std::int64_t, WaitWord*>> words;
  bool running = false;
};

// Never destroyed: the thread outlives static objects.
Alarm& alarm() {
  static auto* const the_alarm = new Alarm;
  return *the_alarm;
}

void run() {
  Alarm& self = alarm();
  std::unique_lock lock(self.mutex);
  for (;;) {
    if (self.words.empty()) {
      if (self.changed.wait_for(lock, kLinger, [&] { return !self.words.empty(); })) continue;
      self.running = false;
      return;
    }
    const auto first = self.words.begin();
    if (first->first > PollBackoff::now_ns()) {
      // The steady clock is CLOCK_MONOTONIC.
      self.changed.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(first->first)));
      continue;
    }
    first->second->force();
    self.words.erase(first);
  }
}

void start() {
  const SignalsBlocked blocked;
  try {
    std::thread thread(&run);
    pthread_setname_np(thread.native_handle(), "kvpool-alarm");
    thread.detach();
  } catch (const std::system_error&) {
    throw Error(ErrorCode::kState, "no thread left to see to it that a stream does not wait for ever");
  }
}

}  // namespace

void WordAlarm::add(std::int64_t at_ns, WaitWord& word) {
  Alarm& self = alarm();
  const std::lock_guard lock(self.mutex);
  const auto entry = self.words.emplace(at_ns, &word).first;
  try {
    if (!self.running) start();
  } catch (...) {
    self.words.erase(entry);
    throw;
  }
  self.running = true;
  if (entry == self.words.begin()) self.changed.notify_all();
}

void WordAlarm::remove(std::int64_t at_ns, WaitWord& word) noexcept {
  const std::lock_guard lock(alarm().mutex);
  alarm().words.erase({at_ns, &word});
}

}  // namespace kvpool
