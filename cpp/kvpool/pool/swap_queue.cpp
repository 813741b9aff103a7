#include "kvpool/pool/swap_queue.h"

#include <utility>

namespace kvpool {

void SwapQueue::run(TierWay way, const std::shared_ptr<Swap>& swap, Work work) {
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
    swaps_.run(&keys_[static_cast<std::size_t>(way)], Priority::kPrefill, [forget, work = std::move(work)] {
      work();
      forget();
    });
  } catch (...) {
    forget();
    throw;
  }
}

void SwapQueue::refuse() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& swap : unfinished_) swap->close();
}

void SwapQueue::close() noexcept {
  refuse();
  swaps_.stop();
}

}  // namespace kvpool
