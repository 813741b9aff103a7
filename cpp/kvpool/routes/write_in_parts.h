// A write by threads of this process, for one-sided routes on one host. It is cut into parts, so that it ends early
// when it is cancelled, late, or its route is closed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvpool/base/copy.h"
#include "kvpool/base/strips.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// Throws why a write must stop: kPeerLost (`closed`), kCancelled, kDeadline.
void throw_if_stopped(const WriteRequest& request, const char* route, const std::atomic<bool>& closed);

// Throws kArgument unless the blocks of the request are among these, as many destinations as sources.
void check_blocks(const WriteRequest& request, const MediaSpans& local, const MediaSpans& peer, const char* route);

// How a route moves pieces. Any thread of the team calls it. Throws Error.
class PieceMover {
 public:
  virtual void move(std::span<const CopyPiece> pieces) = 0;

 protected:
  ~PieceMover() = default;
};

// Moves everything that the request names, from `local` to `peer`. Writes of up to CopyTeam::kInlineBytes are the
// caller's alone; larger ones are shared with the team. Each piece counts as a call. Checks whether to stop before each
// part, at least once per MiB. Throws what check_blocks, throw_if_stopped or the mover throws, after the last thread
// has stopped.
WriteOutcome write_in_parts(const WriteRequest& request, const MediaSpans& local, const MediaSpans& peer,
                            PieceMover& mover, CopyTeam& team, const char* route, const std::atomic<bool>& closed);

}  // namespace kvpool
