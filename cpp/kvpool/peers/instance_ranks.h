// The ranks of an instance, as its service uses them. A logical instance has several, in processes that joined it; any
// other instance has one, the process of the pool. cpp/kvpool/ranks implements this; PeerNode gets a factory for it.
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
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/link.h"
#include "kvpool/routes/route.h"

namespace kvpool {

class Endpoint;
class Pool;
class RouteMaker;
class SerialExecutor;
class WriterQuarantine;

struct RankInfo {
  std::uint32_t rank = 0;
  bool joined = false;
  std::uint64_t pid = 0;
  std::string host;
  std::string link;     // how it is connected: "unix", "tcp 10.0.0.2:4000"
  std::string address;  // where ranks of peers connect to it
};

// The connection between the ranks of two instances, beside the link of their schedulers.
class GroupConnection {
 public:
  virtual ~GroupConnection() = default;
  // The routes by which this instance writes to the peer.
  virtual std::vector<std::shared_ptr<Route>> routes() = 0;
  // Lets the ranks of both sides connect. `address`: of the peer's scheduler. Throws what Endpoint::connect throws, and
  // kPeerLost when a rank of this instance is lost.
  virtual void meet(const std::string& address, const Waiting& waiting) = 0;
  // Ends the writes of this side soon. Calls `clear` once no peer rank writes here any longer.
  virtual void depart(const Error& why, std::function<void()> clear) = 0;
};

class InstanceRanks {
 public:
  virtual ~InstanceRanks() = default;
  // Adds the description of the ranks to the metadata.
  virtual void introduce(PeerMetadata& metadata) const = 0;
  // Throws kBusy unless all ranks have joined, kPeerLost when a rank is lost.
  virtual void check_complete() const = 0;
  // Plans how the ranks will connect to those of this peer. Null when both instances have one rank: then blocks travel
  // over the link of the two pools. Throws kLayoutMismatch, and what check_complete() throws.
  virtual std::shared_ptr<GroupConnection> plan(const PeerMetadata& peer) = 0;
  // Admits a rank of this instance that joins, or a rank of a peer. Throws as Endpoint::Admit.
  virtual std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata) = 0;
  // This side has called a peer, but a rank has answered: ends the link, and the meeting that it was for.
  virtual void refuse(const std::shared_ptr<Link>& link, std::uint64_t meeting, const Error& why) = 0;

  // The next two throw kState for an instance of one rank.
  virtual std::vector<RankInfo> list() const = 0;
  // Waits until all ranks have joined; false at the deadline. Throws kPeerLost when a rank is lost.
  virtual bool wait_until_joined(std::int64_t deadline_ns) = 0;

  // Disconnects all ranks, and waits shortly until no peer writes here. REQUIRES: the sessions have ended.
  virtual void close() noexcept = 0;
  // Joins the threads. REQUIRES: close() was called.
  virtual void stop() noexcept = 0;
};

// What the ranks use of the service. All of it outlives them.
struct RanksHost {
  Pool& pool;
  const std::string& name;          // of the instance
  const std::uint64_t incarnation;  // of the instance
  RouteMaker& routes;
  WriterQuarantine& writer_quarantine;
  SerialExecutor& watches;  // of WriterQuarantine::kWatchLimits
  Endpoint& endpoint;
  // Called once, from any thread, when a rank is lost, and with it its part of every block.
  std::function<void(const Error& why)> on_rank_lost;
};

using MakeRanks = std::function<std::unique_ptr<InstanceRanks>(const RanksHost& host)>;

}  // namespace kvpool
