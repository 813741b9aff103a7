// A heartbeat: a thread writes the time into a page of shared memory, so that other processes can see that this process
// runs, even while its interpreter is busy.
//
// The page (words of 64 bits, in the machine's order):
//
//     0  beat    CLOCK_MONOTONIC in ns, written every interval
//     1  lapses  how often two beats were further apart than the lease: the process was stopped, or got no CPU
//
// The caller may use the other words. A reader must read the clock before it reads the beat. If it then finds the beat
// older than the lease, the lapse is certain to be counted, because the writer reads the clock again after it has
// stored a beat.
//
// Threads: any may call. In a forked child there is no thread and no page, and every call does nothing.
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

  // Writes the first beat, then starts. `descriptor` is a file of kPageBytes or more that can be mapped for writing;
  // the caller may close it afterwards. Continues a count of lapses that is already in the page. REQUIRES: 0 <
  // interval_ns < lease_ns. Throws kUnsupported when the file cannot be mapped or the thread cannot be started.
  Heartbeat(int descriptor, std::int64_t interval_ns, std::int64_t lease_ns);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Ends the thread; the last beat stays. Idempotent.
  void stop() noexcept;

  // As in the page; 0 in a forked child.
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
  // Separate, so that a forked child can leave it alone: its lock may be held, and its thread exists in the parent
  // only.
  struct Running {
    std::mutex mutex;
    std::condition_variable wake;
    bool stopping = false;
    std::thread thread;
  };
  std::unique_ptr<Running> running_ = std::make_unique<Running>();
};

}  // namespace kvpool
