// How far the parting from a peer has come: one progression for the links of peers (session.h) and of ranks
// (rank_channel.h).
//
// A link has two of these values. One is of this side: its writes into the peer's blocks, and then the link itself. The
// other is of the peer: what it writes here. It begins open and goes by what the peer says, so it knows no kStopping
// and no kSaying.
//
// Invariants
//   D7  A state is never left for an earlier one. States may be skipped: a link that breaks goes from kOpen to
//       kLinkEnded.
//   D8  Of the threads that advance to the same state, one alone is told that it did, and does what belongs to it.
//   D9  States and counts of writes change in one order for all threads (sequentially consistent). A thread that ends
//       the last write and then looks here, and one that advances here and then looks at the count, cannot both miss
//       the other.
//
// Whether writes of this side can be known to end at all (a broken route, a lost GPU) is no state: it is known before,
// in the middle, or never, and it keeps this side from reaching kSaying. The same is true of the proof that a peer's
// process is gone.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvpool {

enum class PartingState : std::uint8_t {
  kOpen,       // writes may begin
  kStopping,   // none begins; those under way end soon
  kSaying,     // none is under way, and one thread tells the other side
  kDrained,    // the writing side has said that it writes no more
  kLinkEnded,  // nothing arrives over the link any more
  kSettled,    // nothing is being placed here either, and what was promised to the peer is in quarantine, or free
};

// Thread-safety: all of it.
class Parting {
 public:
  // Returns whether this call did it: not when it is there already, or further.
  bool advance(PartingState to) noexcept {
    PartingState now = state_.load();
    while (now < to) {
      if (state_.compare_exchange_weak(now, to)) return true;
    }
    return false;
  }
  bool reached(PartingState state) const noexcept { return state_.load() >= state; }

 private:
  std::atomic<PartingState> state_{PartingState::kOpen};
};

}  // namespace kvpool
