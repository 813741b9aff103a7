// Writes straight into another process's memory (process_vm_writev), whatever memory that is: for what an engine
// allocated, which cannot be mapped. One copy by the kernel, no doing of the receiver.
//
// Opt-in, on both sides: who may do this may write anywhere in the process. The side that is written to allows it by
// allow_tracers().
#pragma once

#include <sys/types.h>

#include <memory>

#include "kvpool/base/copy.h"
#include "kvpool/base/segment.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// `local` describes memory that `keepalive` keeps as long as the route lives; so does the team. `pidfd` is duplicated.
// Reads one byte of the peer to see whether the kernel allows it. Throws Error kUnsupported (it does not, and what to
// do about it; no pidfd), kPeerLost (the process is gone), kProtocol (pid and pidfd are two processes, or the
// memory is not where the metadata says). REQUIRES: the peer is in our PID namespace (PeerMetadata::host).
std::unique_ptr<Route> make_cma_route(MediaSpans local, std::shared_ptr<void> keepalive, const PeerMetadata& metadata,
                                      pid_t pid, int pidfd, CopyTeam& team);

}  // namespace kvpool
