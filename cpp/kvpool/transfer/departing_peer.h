// A party whose link has ended or is ending, and which may still write here: a session with a peer, or a channel
// between two ranks. Blocks promised to it stay out of use until it is proved that it no longer writes.
#pragma once

#include <cstdint>

#include "kvpool/net/connect/peer_metadata.h"

namespace kvpool {

class DepartingPeer {
 public:
  virtual ~DepartingPeer() = default;
  virtual const PeerMetadata& peer() const noexcept = 0;
  // Whether blocks here wait for the proof that the peer no longer writes.
  virtual bool awaits_proof() const = 0;
  // Whether it has said that it no longer writes; then it has no memory of this side mapped either.
  virtual bool said_over() const noexcept = 0;
  // Whether nothing more arrives over the link, and no content is being placed.
  virtual bool link_ended() const noexcept = 0;
  // The proof is there.
  virtual void on_writer_gone() = 0;
  // The number of this side's writes in progress.
  virtual std::uint32_t writes_under_way() const noexcept = 0;
};

}  // namespace kvpool
