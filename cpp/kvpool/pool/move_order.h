// What the copies of one verb between the tiers follow on a GPU.
#pragma once

#include "kvpool/cuda/stream.h"

namespace kvpool {

class Swap;

class MoveOrder {
 public:
  // Of a caller who waits: the earlier work of that stream, or, without one, of the whole device. The GPU keeps it.
  MoveOrder(CallerStream stream) noexcept : stream_(stream) {}  // NOLINT(google-explicit-constructor)
  // Of a thread of the pool: it waits itself, before the copy, so that the swap can be given up.
  explicit MoveOrder(Swap& swap) noexcept : swap_(&swap) {}

  Swap* swap() const noexcept { return swap_; }  // null: of a caller who waits
  bool of_device() const noexcept { return swap_ == nullptr && !stream_; }
  // What is left for the copy itself to wait for.
  CopyOrder at_copy() const noexcept { return swap_ != nullptr ? CopyOrder::met() : CopyOrder(stream_); }

 private:
  CallerStream stream_;
  Swap* swap_ = nullptr;
};

}  // namespace kvpool
