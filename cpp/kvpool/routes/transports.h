// The list of all transports.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvpool/routes/transport.h"

namespace kvpool {

// By default routes are tried in this order.
std::span<const TransportKind> all_transports() noexcept;

// The kinds with these names, in the order of `kinds`; without names, the default ones. `in_pieces`: only those that
// find the pieces of blocks. Throws kArgument for a name that is not in `kinds`, kUnsupported for one that is and does
// not find them.
std::vector<TransportKind> transports_named(std::span<const TransportKind> kinds, const std::vector<std::string>& names,
                                            bool in_pieces);

// Copies from a peer's blocks that are mapped here into this pool's: a route the other way round, whose local blocks
// are the peer's. The team outlives it.
std::unique_ptr<Route> make_reader(std::shared_ptr<const MediaSpans> from, const LocalMemory& to, CopyTeam& team);

}  // namespace kvpool
