// The list of all transports.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kvpool/routes/transport.h"

namespace kvpool {

// By default routes are tried in this order.
std::span<const TransportKind> all_transports() noexcept;

// The kinds with these names, in the order of `kinds`; without names, the default ones. Throws kArgument for a name
// that is not in `kinds`.
std::vector<TransportKind> transports_named(std::span<const TransportKind> kinds,
                                            const std::vector<std::string>& names);

}  // namespace kvpool
