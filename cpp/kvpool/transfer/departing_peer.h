// A party whose link has ended, or is about to, and which may still write here: its promised blocks stay as they are
// until it is proved that it writes no more: a session with a peer, or a channel between two ranks.
#pragma once

#include <cstdint>

#include "kvpool/net/connect/peer_metadata.h"

namespace kvpool {

class DepartingPeer {
 public:
  virtual ~DepartingPeer() = default;
  virtual const PeerMetadata& peer() const noexcept = 0;
  // Something here waits for the proof that the peer writes no more.
  virtual bool awaits_proof() const = 0;
  // It has said that it writes no more: nothing of this side's is mapped there either.
  virtual bool said_over() const noexcept = 0;
  // Nothing arrives over the link any more, and nothing is being placed.
  virtual bool link_ended() const noexcept = 0;
  // The proof is there.
  virtual void on_writer_gone() = 0;
  // Writes of this side that are under way.
  virtual std::uint32_t writes_under_way() const noexcept = 0;
};

}  // namespace kvpool
