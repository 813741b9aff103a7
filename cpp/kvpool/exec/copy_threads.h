// A team of copiers (base/copy.h) that borrows the threads of an executor.
#pragma once

#include <algorithm>
#include <utility>

#include "kvpool/base/copy.h"
#include "kvpool/exec/executor.h"

namespace kvpool {

class CopyThreads {
 public:
  // `threads` counts the caller of a copy. The executor outlives it.
  CopyThreads(Executor& executor, int threads)
      : tasks_(executor, limits(threads)),
        team_(threads, [this](Task task) { return tasks_.try_run(std::move(task)); }) {}

  CopyTeam& team() noexcept { return team_; }

 private:
  // The team itself bounds how many it borrows. A thread that has just given itself back to the team is the executor's
  // a moment later: a copy that begins in between takes another.
  static TaskLimits limits(int threads) noexcept {
    const int borrowed = std::max(threads - 1, 1);
    return {borrowed, 2 * borrowed};
  }

  TaskClass tasks_;
  CopyTeam team_;  // waits for what it has borrowed
};

}  // namespace kvpool
