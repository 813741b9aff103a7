// Connects to peers: at an address that the application names, or at the addresses of a cluster's member.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/base/wait.h"
#include "kvpool/net/connect/endpoint.h"
#include "kvpool/peers/address_book.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/peers/single_flight.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

class PeerTable;
class Pool;

class PeerCaller {
 public:
  // All of it outlives the caller. `incarnation`: of this pool.
  PeerCaller(Pool& pool, PeerTable& table, const AddressBook& book, Endpoint& endpoint, InstanceRanks& ranks,
             std::uint64_t incarnation)
      : pool_(pool), table_(table), book_(book), endpoint_(endpoint), ranks_(ranks), incarnation_(incarnation) {}

  // As Service::connect.
  std::string connect(const std::string& address, const Waiting& waiting, bool wait_for_listener);
  // The session with this peer. Connects to a member of the cluster first, if necessary. Throws kPeerLost, kFenced,
  // kClosed, kCancelled.
  std::shared_ptr<Session> reach(const std::string& peer, std::int64_t until_ns, const GivenUp& given_up);
  // The name of the peer or member that owns these blocks. Throws kArgument unless all belong to one other instance,
  // kPeerLost.
  std::string owner_of(const std::vector<Address>& addresses) const;

  // Whether a thread is inside connect().
  bool calls() const noexcept { return calls_.load() > 0; }

 private:
  void measure_routes(const std::string& peer, const Waiting& waiting);
  std::string visit(const std::string& address, const Waiting& waiting, bool wait_for_listener);
  std::string meet(const std::string& address, const Waiting& waiting);
  bool take_another_id(std::uint32_t refused, const Waiting& waiting);
  void meet_ranks(const std::shared_ptr<Link>& link, const std::string& address, const Waiting& waiting);
  void call_on(const ClusterMember& member, const Waiting& waiting);
  [[noreturn]] void throw_unknown(const std::string& peer) const;

  Pool& pool_;
  PeerTable& table_;
  const AddressBook& book_;
  Endpoint& endpoint_;
  InstanceRanks& ranks_;
  const std::uint64_t incarnation_;
  SingleFlight attempts_;
  std::atomic<int> calls_{0};
};

}  // namespace kvpool
