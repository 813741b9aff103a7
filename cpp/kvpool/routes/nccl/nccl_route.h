// HBM to HBM by NCCL's send and receive: docs/adr/0013-nccl-route.md.
//
// One communicator, one stream and one thread at a time for each direction of a pair, so messages meet in the order in
// which they were sent; the other direction has its own and is not held up. What goes where is said on the link: the
// receiver checks each pass as it checks frames of the sock route, and answers when the content is in place.
//
// A communicator is made when it is first needed. Whatever goes wrong (the peer, a deadline, a cancellation, NCCL), it
// is aborted on both sides and nothing of it writes any more; the next write makes another.
#pragma once

#include <memory>

#include "kvpool/net/link.h"
#include "kvpool/routes/nccl/nccl_inbox.h"
#include "kvpool/routes/nccl/nccl_pipe.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// Writes throw, beside what Route::write says, kRouteFailed for what NCCL or the GPU of either side says, kUnsupported
// when it would say so again, kNotOwner when the receiver refuses the blocks: the peer goes on in all of these. Unless
// it is kPeerLost, the receiver has left what was begun, too. `run` runs the receiving half, and gives back what the
// sending half has taken of the GPU; it may be called until the route is destroyed.
std::shared_ptr<Route> make_nccl_route(const NcclMemory& memory, const std::shared_ptr<Link>& link, RouteRun run);

}  // namespace kvpool
