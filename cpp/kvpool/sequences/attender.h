// What a pool computes attention with: threads that carry tasks out, a team that they share, and for blocks on a GPU
// the kernels there. A thread that waits for a task may compute it, too, so computations are counted: a pool that ends
// waits for all of them.
//
// Thread-safety: all of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "kvpool/attend_gpu/gpu_attention.h"
#include "kvpool/attention/attend.h"
#include "kvpool/base/pace.h"
#include "kvpool/exec/copy_threads.h"
#include "kvpool/exec/executor.h"

namespace kvpool {

class Attender {
 public:
  // `threads`: that compute one task, the one that carries it out among them. `gpu`: null when attention cannot read
  // blocks on a GPU. The executor outlives this.
  Attender(Executor& executor, int threads, std::shared_ptr<GpuAttention> gpu = nullptr)
      : gpu_kernel_(gpu != nullptr ? std::optional(gpu->kernel()) : std::nullopt),
        threads_(threads),
        peers_threads_(std::max(threads / 2, 1)),
        gpu_(std::move(gpu)),
        team_(executor, threads),
        peers_team_(executor, peers_threads_),
        tasks_(executor, {1, kTasksAtOnce}) {}
  Attender(const Attender&) = delete;
  Attender& operator=(const Attender&) = delete;

  AttendTeam team() noexcept { return {&team_.team(), threads_}; }
  // For what peers ask: half as many threads, of a team of their own, so that the pool's own calls find theirs.
  AttendTeam team_for_peers() noexcept { return {&peers_team_.team(), peers_threads_}; }
  // Set when the pool is about to close.
  const std::atomic<bool>& stopping() const noexcept { return stopping_; }
  // Runs work that computes in a thread of the pool. Throws std::bad_alloc, kFork.
  void start(Priority priority, Task work) { tasks_.run(priority, std::move(work)); }

  // That of blocks on a GPU; nullopt: attention cannot read them.
  const std::optional<KernelId>& gpu_kernel() const noexcept { return gpu_kernel_; }
  // Throws kUnsupported without one, kClosed after stop().
  std::shared_ptr<GpuAttention> gpu() const;

  // Of attention over blocks that this process reads itself, not its GPU, by bytes of keys and values.
  Pace& pace() noexcept { return pace_; }

  // One computation, in any thread.
  class Computing {
   public:
    // Throws kClosed after stop().
    explicit Computing(Attender& attender);
    ~Computing();
    Computing(const Computing&) = delete;
    Computing& operator=(const Computing&) = delete;

   private:
    Attender& attender_;
  };
  // Returns when no computation is under way; none begins from now on, and nothing is left on the GPU. Idempotent.
  void stop() noexcept;

 private:
  static constexpr int kTasksAtOnce = 4;

  const std::optional<KernelId> gpu_kernel_;
  const int threads_;
  const int peers_threads_;
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;  // guards the next four
  std::shared_ptr<GpuAttention> gpu_;
  std::condition_variable ended_;
  int computing_ = 0;
  bool stopped_ = false;
  Pace pace_;
  CopyThreads team_;
  CopyThreads peers_team_;
  TaskClass tasks_;  // the last: its tasks use the others until they have ended
};

}  // namespace kvpool
