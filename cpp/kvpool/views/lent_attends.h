// Attention that a pool computes for its peers over blocks that they view. Each runs in a thread of the pool, never in
// the one that reads links, and waits for nothing: so two pools that compute for each other cannot wait for each other.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "kvpool/exec/executor.h"
#include "kvpool/sequences/attend_task.h"
#include "kvpool/transfer/served_call.h"
#include "kvpool/views/view_messages.h"

namespace kvpool {

class Attender;
class Pool;

class LentAttends {
 public:
  // `most`: so many calls of all peers may run or wait for a thread, and one of each peer in any case; 0: none. All of
  // these outlive it.
  LentAttends(Pool& pool, Attender& attender, Executor& executor, std::uint32_t most)
      : pool_(pool), attender_(attender), most_(most), calls_(executor, {1, kAtOnce}) {}
  virtual ~LentAttends() = default;
  LentAttends(const LentAttends&) = delete;
  LentAttends& operator=(const LentAttends&) = delete;

  // Computes and answers the call, or refuses it; at its deadline, or when its caller has given up, soon. `body.q` has
  // moved to the request, whose entries are those of `body`. Throws kBusy when too many run or wait, std::bad_alloc.
  void start(std::uint64_t peer, const CallPointer& call, AttendBody&& body, AttendRequest&& request);
  bool computes() const noexcept { return most_ > 0; }
  bool reads_gpu() const noexcept;  // blocks on the pool's GPU: no peer can read those itself
  // Set when the pool is about to close.
  const std::atomic<bool>& stopping() const noexcept;
  // Returns when all have ended. Idempotent.
  void stop() noexcept { calls_.stop(); }

 protected:
  // In a thread that may compute. Throws std::bad_alloc: then it does not run.
  virtual void run_later(std::uint64_t peer, Priority priority, Task work) {
    calls_.run(peer, priority, std::move(work));
  }
  // When a call's computation stops, by CLOCK_MONOTONIC.
  virtual std::int64_t stops_at_ns(const ServedCall& call) const noexcept { return call.deadline_ns(); }

 private:
  static constexpr int kAtOnce = 2;  // they share the threads of the pool's attention
  struct Job;
  void carry_out(Job& job) noexcept;
  void admit(std::uint64_t peer);
  void leave(std::uint64_t peer) noexcept;
  void measure(std::int64_t ns) noexcept;

  Pool& pool_;
  Attender& attender_;
  const std::uint32_t most_;
  std::mutex mutex_;  // guards the next two
  std::uint32_t under_way_ = 0;
  std::unordered_map<std::uint64_t, std::uint32_t> of_peers_;  // that have any
  std::atomic<std::int64_t> mean_ns_{1'000'000};               // of one call, lately
  TaskClass calls_;  // the last: its tasks use the others until they have ended
};

}  // namespace kvpool
