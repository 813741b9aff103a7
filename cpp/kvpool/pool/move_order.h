// The GPU work that must end before the copies of one verb between the tiers.
#pragma once

#include "kvpool/cuda/stream.h"

namespace kvpool {

class Swap;

class MoveOrder {
 public:
  // For a caller that waits: after the earlier work of that stream, or, without one, of the whole device. The GPU keeps
  // this order.
  MoveOrder(CallerStream stream) noexcept : stream_(stream) {}  // NOLINT(google-explicit-constructor)
  // For a thread of the pool, which itself waits before the copy, so that the swap can be cancelled.
  explicit MoveOrder(Swap& swap) noexcept : swap_(&swap) {}

  Swap* swap() const noexcept { return swap_; }  // null: the caller waits
  bool of_device() const noexcept { return swap_ == nullptr && !stream_; }
  // What the copy itself still has to wait for.
  CopyOrder at_copy() const noexcept { return swap_ != nullptr ? CopyOrder::met() : CopyOrder(stream_); }

 private:
  CallerStream stream_;
  Swap* swap_ = nullptr;
};

}  // namespace kvpool
