// Writes directly into any memory of another process (process_vm_writev): for memory that an engine allocated, which
// cannot be mapped. The kernel copies once, without the receiver's help; one call takes a list of up to 1,024 pieces.
//
// Opt-in on both sides, because a process that may do this may write anywhere in the other one. The receiving side
// allows it with allow_tracers().
#pragma once

#include <sys/types.h>

#include <memory>

#include "kvpool/base/copy.h"
#include "kvpool/base/segment.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// `local` describes memory that `keepalive` keeps alive. The team outlives the route. Duplicates `pidfd`. Reads one
// byte of the peer to see whether the kernel allows it. Throws Error kUnsupported (not allowed: the text says what to
// do; no pidfd), kPeerLost (the process is gone), kProtocol (pid and pidfd are two processes, or the memory is not
// where the metadata says). REQUIRES: the peer is in our PID namespace (PeerMetadata::host).
std::unique_ptr<Route> make_cma_route(MediaSpans local, std::shared_ptr<void> keepalive, const PeerMetadata& metadata,
                                      pid_t pid, int pidfd, CopyTeam& team);

}  // namespace kvpool
