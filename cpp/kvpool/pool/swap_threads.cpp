#include "kvpool/pool/swap_threads.h"

#include <utility>

namespace kvpool {

void SwapThreads::run(TierWay way, const std::shared_ptr<Swap>& swap, Work work) {
  bool closed = false;
  {
    const std::lock_guard lock(mutex_);
    closed = closed_;
    if (!closed) unfinished_.insert(swap);
  }
  if (closed) swap->close();
  const auto forget = [this, swap] {
    const std::lock_guard lock(mutex_);
    unfinished_.erase(swap);
  };
  try {
    threads_[static_cast<std::size_t>(way)].run(Priority::kPrefill, [forget, work = std::move(work)] {
      work();
      forget();
    });
  } catch (...) {
    forget();
    throw;
  }
}

void SwapThreads::refuse() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& swap : unfinished_) swap->close();
}

void SwapThreads::close() noexcept {
  refuse();
  for (WorkerPool& thread : threads_) thread.stop();
}

}  // namespace kvpool
