// The ranks of this instance, as its scheduler uses them: one in this process (a pool that is an instance of one rank),
// or several that have joined from other processes (rank_hub.h).
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/base/wait.h"
#include "kvpool/ranks/group_route.h"
#include "kvpool/ranks/rank_channels.h"
#include "kvpool/transfer/reshard.h"

namespace kvpool {

// The connection of two logical instances.
struct GroupMeeting {
  std::uint64_t meeting = 0;
  std::string peer;
  std::vector<MetadataRank> peer_ranks;          // by rank; of an instance of one rank, the peer itself
  std::shared_ptr<const ReshardPlan> to_peer;    // what goes there
  std::shared_ptr<const ReshardPlan> from_peer;  // what comes from there

  // The ranks of the peer that this one sends something to, or gets something from.
  std::vector<MetadataRank> partners(std::uint32_t own_rank) const;
};

class RankSet {
 public:
  virtual ~RankSet() = default;
  // The writer for each rank of this instance, by rank number.
  virtual std::vector<std::unique_ptr<RankWriter>> writers(std::uint64_t meeting) = 0;
  // Lets every rank connect to its partners. Throws what RankChannels::meet throws, kDeadline, kCancelled, and
  // kPeerLost when a rank of this instance is lost.
  virtual void meet(const GroupMeeting& meeting, const Waiting& waiting) = 0;
  // As RankChannels::depart, for all ranks.
  virtual void depart(std::uint64_t meeting, const Error& why, std::function<void()> clear) = 0;
};

// `channels` outlives it.
std::unique_ptr<RankSet> make_local_rank_set(RankChannels& channels);

}  // namespace kvpool
