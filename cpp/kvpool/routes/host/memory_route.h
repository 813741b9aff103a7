// Routes that copy: the peer's blocks are in this address space.
//
// `loopback`: the peer is another pool of this process. `shm`: a process on this host whose arenas are mapped here. One
// copy, by the caller and, from CopyTeam::kInlineBytes on, by its team. When write() returns the bytes are visible to
// a peer that receives a message sent later.
#pragma once

#include <memory>

#include "kvpool/base/copy.h"
#include "kvpool/base/segment.h"
#include "kvpool/routes/peer_memory.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// `local` and `peer` describe memory that `keepalive` keeps alive. The team outlives the route.
std::unique_ptr<Route> make_loopback_route(MediaSpans local, MediaSpans peer, std::shared_ptr<void> keepalive,
                                           CopyTeam& team);

// Throws as MappedPeer::make. The caller may close the descriptors afterwards.
std::unique_ptr<Route> make_shm_route(MediaSpans local, std::shared_ptr<void> keepalive, const PeerMetadata& metadata,
                                      const MediaFiles& files, CopyTeam& team);

}  // namespace kvpool
