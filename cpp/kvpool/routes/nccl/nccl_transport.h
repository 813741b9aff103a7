// The transport nccl: from HBM to HBM. See nccl_route.h.
#pragma once

#include <memory>

#include "kvpool/routes/transport.h"

namespace kvpool {

std::unique_ptr<Transport> make_nccl_transport(const TransportSetup& setup);

}  // namespace kvpool
