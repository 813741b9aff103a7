// What one peer reads of this pool's blocks where they are, without having them sent. A floor above sessions implements
// it (cpp/kvpool/views): a session only tells it what happens.
//
// Thread-safety: all of it.
#pragma once

#include <span>

#include "kvpool/base/address.h"

namespace kvpool {

class PeerCalls;

class PeerReads {
 public:
  virtual ~PeerReads() = default;
  // Registers its verbs. Called once, before the first message.
  virtual void serve(PeerCalls& calls) = 0;
  // These blocks were lent to the peer, and were recalled.
  virtual void on_recalled(std::span<const Address> addresses) noexcept = 0;
  // The link has ended.
  virtual void on_lost() noexcept = 0;
};

}  // namespace kvpool
