// The transport sock: over the link itself. See sock_route.h.
#pragma once

#include <memory>

#include "kvpool/routes/transport.h"

namespace kvpool {

std::unique_ptr<Transport> make_sock_transport(const TransportSetup& setup);

}  // namespace kvpool
