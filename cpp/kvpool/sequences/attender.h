// The threads with which a pool computes attention: some that carry tasks out, and a team that they share.
//
// Thread-safety: all of it.
#pragma once

#include <memory>

#include "kvpool/attention/attend.h"
#include "kvpool/exec/copy_threads.h"
#include "kvpool/exec/executor.h"
#include "kvpool/sequences/attend_task.h"

namespace kvpool {

class Attender {
 public:
  // `threads`: that compute one task, the one that carries it out among them. The executor outlives this.
  Attender(Executor& executor, int threads)
      : threads_(threads), team_(executor, threads), tasks_(executor, {1, kTasksAtOnce}) {}
  Attender(const Attender&) = delete;
  Attender& operator=(const Attender&) = delete;

  AttendTeam team() noexcept { return {&team_.team(), threads_}; }
  // Computes the task in a thread of the pool, unless a waiting thread does so first. Throws std::bad_alloc, kFork.
  void start(std::shared_ptr<AttendTask> task) {
    tasks_.run(Priority::kDecode, [task = std::move(task)] { task->run(); });
  }

 private:
  static constexpr int kTasksAtOnce = 4;

  const int threads_;
  CopyThreads team_;
  TaskClass tasks_;  // the last: its tasks use the team until they have ended
};

}  // namespace kvpool
