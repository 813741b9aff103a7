// All transports that there are.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kvpool/routes/transport.h"

namespace kvpool {

// By default routes are tried in this order.
std::span<const TransportKind> all_transports() noexcept;

// Those of these names, in their order; without names, those that are used by default. Throws kArgument for a name that
// is not among `kinds`.
std::vector<TransportKind> transports_named(std::span<const TransportKind> kinds,
                                            const std::vector<std::string>& names);

}  // namespace kvpool
