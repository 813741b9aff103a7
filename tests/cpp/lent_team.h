// A team of copiers with threads of an executor that belongs to it.
#pragma once

#include <algorithm>
#include <utility>

#include "kvpool/base/copy.h"
#include "kvpool/exec/executor.h"

namespace kvpool::testing {

struct TeamThreads {
  explicit TeamThreads(int threads) : tasks(executor, {std::max(threads, 1), 2 * std::max(threads, 1)}) {}
  Executor executor;
  TaskClass tasks;
};

class LentTeam : private TeamThreads, public CopyTeam {
 public:
  explicit LentTeam(int threads)
      : TeamThreads(threads), CopyTeam(threads, [this](Task task) { return tasks.try_run(std::move(task)); }) {}
};

}  // namespace kvpool::testing
