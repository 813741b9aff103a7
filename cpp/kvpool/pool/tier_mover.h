// Copies blocks between the tiers of a logical instance, whose memory is in its ranks, so that the pool itself cannot.
#pragma once

#include <cstddef>

#include "kvpool/base/address.h"

namespace kvpool {

class TierMover {
 public:
  // Copies block from[i] to block to[i], and returns when all are copied. Throws Error, std::bad_alloc; then the
  // content of `to` is undefined, and nothing writes there any more, unless the instance is lost as well.
  virtual void move(const Address* from, const Address* to, std::size_t n) = 0;

 protected:
  ~TierMover() = default;
};

}  // namespace kvpool
