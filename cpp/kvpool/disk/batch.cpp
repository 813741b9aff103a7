#include "kvpool/disk/batch.h"

#include <utility>

#include "kvpool/disk/core.h"

namespace kvpool {

Batch::Batch(std::weak_ptr<StoreCore> core, std::size_t size, std::int64_t deadline, DiskEnd end)
    : ops(size), deadline_ns(deadline), pending(size), core_(std::move(core)), on_end_(std::move(end)) {
  for (Op& op : ops) op.batch = this;
}

DiskStatus Batch::status(std::size_t i) const noexcept {
  return i < ops.size() && ended_.load(std::memory_order_acquire) ? ops[i].status : DiskStatus::kPending;
}

void Batch::cancel() noexcept {
  if (const auto core = core_.lock()) core->cancel(*this, false);
}

void Batch::abandon() noexcept {
  if (const auto core = core_.lock()) core->cancel(*this, true);
}

void Batch::end() noexcept {
  ended_.store(true, std::memory_order_release);
  if (on_end_) on_end_(*this);
  on_end_ = nullptr;
  completion_.finish();
}

}  // namespace kvpool
