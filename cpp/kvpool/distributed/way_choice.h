// Which way attention takes to blocks that lie with peers: the query goes there, or this pool reads them from here,
// through a mapping of the peer's memory.
//
// Peers compute beside each other and beside this pool, so a call takes as long as the slowest of them:
//
//      max(this pool: its own bytes and those that it reads at peers, each peer: its bytes and the way there and back)
//
// with the times that earlier calls took (base/pace.h). Greedy: from the peer that takes longest on, the bytes of a
// peer come here as long as that makes the call faster. A way that was not used for a second is tried again, so that a
// change is noticed: by a call that takes it for one peer.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace kvpool {

class Pace;

enum class AttendWhere : std::uint8_t { kAuto, kHere, kThere };

struct PeerOption {
  Pace* pace = nullptr;     // of calls to this peer
  std::uint64_t bytes = 0;  // of keys and values that the call needs from there
  bool readable = false;    // from here
};

// For each peer whether its blocks are read from here. `own_bytes`: of this pool's own blocks.
std::vector<bool> read_from_here(std::uint64_t own_bytes, const Pace& here, const std::vector<PeerOption>& peers,
                                 std::int64_t now_ns);

}  // namespace kvpool
