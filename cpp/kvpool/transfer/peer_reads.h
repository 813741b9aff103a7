// What one peer reads of this pool's blocks where they are, without having them sent. A floor above sessions implements
// it (cpp/kvpool/views): a session only tells it what happens.
//
// Thread-safety: all of it.
#pragma once

#include <cstddef>
#include <span>

#include "kvpool/base/address.h"

namespace kvpool {

class PeerCalls;

class PeerReads {
 public:
  virtual ~PeerReads() = default;
  // Registers its verbs. Called once, before the first message.
  virtual void serve(PeerCalls& calls) = 0;
  // These blocks were lent to the peer, and were recalled. Returns how many it may still be reading through a mapping:
  // they stay held until it says that it no longer does. Takes a while.
  virtual std::size_t on_recalled(std::span<const Address> addresses) noexcept = 0;
  // Whether it reads any block.
  virtual bool has_any() const noexcept = 0;
  // The link has ended.
  virtual void on_lost() noexcept = 0;
  // The peer no longer reads through a mapping: it has said so, or is proved to be gone.
  virtual void on_reader_gone() noexcept = 0;
  // Whether blocks are held for what the peer may read through a mapping.
  virtual bool awaits_proof() const noexcept = 0;
};

}  // namespace kvpool
