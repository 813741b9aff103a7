// HBM to HBM by NCCL's send and receive: docs/adr/0013-nccl-route.md.
//
// Each direction of a pair has one communicator, one stream and one thread at a time, so sends and receives match in
// order, and the directions do not delay each other. The link says what goes where: the receiver checks each pass as it
// checks frames of the sock route, and answers when the content is in place.
//
// A communicator is made when it is first needed. After any failure (the peer, a deadline, a cancellation, NCCL) both
// sides abort it, so that it writes nothing any more; the next write makes another.
#pragma once

#include <memory>

#include "kvpool/net/link.h"
#include "kvpool/routes/nccl/nccl_inbox.h"
#include "kvpool/routes/nccl/nccl_pipe.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// Besides what Route::write says, writes throw kRouteFailed for errors of NCCL or of either side's GPU, kUnsupported if
// a retry would fail as well, and kNotOwner when the receiver refuses the blocks; the peer stays connected in all of
// these. After any error but kPeerLost, the receiver has left the communicator, too. `run` runs the receiving half, and
// frees what the sending half has allocated on the GPU; it may be called until the route is destroyed.
std::shared_ptr<Route> make_nccl_route(const NcclMemory& memory, const std::shared_ptr<Link>& link, RouteRun run);

}  // namespace kvpool
