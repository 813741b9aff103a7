// The transports between processes of one host whose CPUs copy.
#pragma once

#include <memory>

#include "kvpool/routes/transport.h"

namespace kvpool {

// Between pools of one process. If one GPU reaches memory of both, it copies as well.
std::unique_ptr<Transport> make_loopback_transport(const TransportSetup& setup);
// Into memory of the peer that is mapped here.
std::unique_ptr<Transport> make_shm_transport(const TransportSetup& setup);
// By the kernel, into any memory of the peer. Makes this process traceable by other processes of its user.
std::unique_ptr<Transport> make_cma_transport(const TransportSetup& setup);

}  // namespace kvpool
