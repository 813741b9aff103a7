// The transport cuda_ipc: the GPU writes into memory of processes of this host. See cuda_route.h.
#pragma once

#include <memory>

#include "kvpool/routes/transport.h"

namespace kvpool {

std::unique_ptr<Transport> make_cuda_ipc_transport(const TransportSetup& setup);

}  // namespace kvpool
