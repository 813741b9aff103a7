// A heartbeat: a thread writes the time into a page of shared memory, so that other processes can see that this process
// runs, even while its interpreter is busy.
//
// The page (words of 64 bits, in the machine's order):
//
//     0  beat    CLOCK_MONOTONIC in ns, written every interval
//     1  lapses  how often two beats were further apart than the lease: the process was stopped, or got no CPU
//
// The other words are the caller's. A reader that takes the time first, then reads the beat, and finds it older than
// the lease may act on that: the lapse is counted then, for certain, because the writer reads the clock once more after
// it has stored a beat.
//
// Threads: any may call. In a forked child there is no thread and no page; nothing here does anything then.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "kvpool/base/fork_guard.h"

namespace kvpool {

class Heartbeat {
 public:
  static constexpr std::size_t kPageBytes = 4096;

  // Writes the first beat, then starts. `descriptor` is a file that can be mapped for writing, of kPageBytes or more;
  // it may be closed afterwards. A count of lapses that is already in the page continues. REQUIRES: 0 < interval_ns <
  // lease_ns. Throws kUnsupported when the file cannot be mapped, or the thread not be started.
  Heartbeat(int descriptor, std::int64_t interval_ns, std::int64_t lease_ns);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Ends the thread; the last beat stays. Idempotent.
  void stop() noexcept;

  // Of the page. In a forked child 0, as if there had never been any.
  std::int64_t beat_ns() const noexcept;
  std::int64_t lapses() const noexcept;

  // Whether the last beat is younger than the lease by the clock now.
  bool fresh() const noexcept;

 private:
  bool forked() const noexcept { return fork_generation() != born_; }
  std::atomic_ref<std::int64_t> word(std::size_t index) const noexcept;
  void beat() noexcept;
  void loop() noexcept;

  const std::uint32_t born_ = fork_generation();
  const std::int64_t interval_ns_;
  const std::int64_t lease_ns_;
  std::int64_t* page_;
  // Apart, so that a forked child can leave it as it is: its lock may be held, and its thread is the parent's.
  struct Running {
    std::mutex mutex;
    std::condition_variable wake;
    bool stopping = false;
    std::thread thread;
  };
  std::unique_ptr<Running> running_ = std::make_unique<Running>();
};

}  // namespace kvpool
