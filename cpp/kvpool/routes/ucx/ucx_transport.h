// The transport ucx: by what UCX finds. See ucx.h.
#pragma once

#include <memory>

#include "kvpool/routes/transport.h"

namespace kvpool {

std::unique_ptr<Transport> make_ucx_transport(const TransportSetup& setup);

}  // namespace kvpool
