// Makes the ranks of a pool. A sharded pool has several, which join from other processes; otherwise the pool's process
// is the only rank. docs/adr/0008-logical-instances.md
#pragma once

#include <memory>

#include "kvpool/peers/instance_ranks.h"

namespace kvpool {

// Passed to PeerNode. From now on the ranks of a sharded pool move its blocks between HBM and DRAM.
std::unique_ptr<InstanceRanks> make_ranks(const RanksHost& host);

}  // namespace kvpool
