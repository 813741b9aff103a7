// HBM to HBM by NCCL's send and receive: docs/adr/0013-nccl-route.md.
//
// Each direction of a pair has one communicator, one stream and one thread at a time. So sends and receives match in
// order, and neither direction delays the other. A message on the link says where the content of a pass belongs; the
// receiver checks it as it checks frames of the sock route, and answers when the content is in place.
//
// The first write makes a communicator. After any failure (the peer, a deadline, a cancellation, NCCL) both sides abort
// it, so nothing more is written through it; the next write makes another.
#pragma once

#include <memory>

#include "kvpool/net/link.h"
#include "kvpool/routes/nccl/nccl_inbox.h"
#include "kvpool/routes/nccl/nccl_pipe.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// Besides the errors of Route::write, a write throws kRouteFailed when NCCL or either side's GPU fails, kUnsupported
// when a retry would fail as well, and kNotOwner when the receiver refuses the blocks; in all of these the peer stays
// connected. After any error but kPeerLost, the receiver has left the communicator, too. `run` runs the receiving half,
// and frees the GPU memory of the sending half; the route may call it until it is destroyed.
std::shared_ptr<Route> make_nccl_route(const NcclMemory& memory, const std::shared_ptr<Link>& link, RouteRun run);

}  // namespace kvpool
