// The ranks of a pool: several that join from other processes where the pool is sharded, else the pool's own process.
// docs/adr/0008-logical-instances.md
#pragma once

#include <memory>

#include "kvpool/peers/instance_ranks.h"

namespace kvpool {

// For PeerNode. From now on the ranks of a sharded pool move its blocks between the tiers.
std::unique_ptr<InstanceRanks> make_ranks(const RanksHost& host);

}  // namespace kvpool
