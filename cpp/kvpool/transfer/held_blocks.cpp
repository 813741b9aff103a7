#include "kvpool/transfer/held_blocks.h"

#include <utility>

#include "kvpool/base/fork_guard.h"

namespace kvpool {

HeldBlocks::HeldBlocks(BlockHost& host, std::vector<Address> addresses)
    : host_(host), addresses_(std::move(addresses)), generation_(fork_generation()) {}

HeldBlocks::~HeldBlocks() {
  if (owns_.load() && generation_ == fork_generation()) host_.release(addresses_);
}

}  // namespace kvpool
