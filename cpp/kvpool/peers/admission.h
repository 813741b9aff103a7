// Admits peers: introduces this pool, checks the peer, and makes the peer's session.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <memory>

#include "kvpool/blocks/layout.h"
#include "kvpool/net/connect/endpoint.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/peers/service_options.h"
#include "kvpool/transfer/session_host.h"

namespace kvpool {

class PeerParting;
class PeerTable;
class Pool;
class RouteMaker;
class WriterQuarantine;

class Admission {
 public:
  // All of it outlives the admission. `ranks` is set before the first peer connects.
  struct Parts {
    Pool& pool;
    const ServiceOptions& options;
    const std::uint64_t incarnation;
    const RouteMaker& routes;
    WriterQuarantine& writer_quarantine;
    PeerTable& table;
    PeerParting& parting;
    SessionHost& host;
    const std::unique_ptr<InstanceRanks>& ranks;
  };
  explicit Admission(const Parts& parts) : parts_(parts) {}

  // As Endpoint::Introduce and Endpoint::Admit.
  Introduction introduce() const;
  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata,
                                     bool initiated_here);

 private:
  class LinkWatcher;

  void check_name(const PeerMetadata& metadata) const;
  void end_half_open(const PeerMetadata& metadata);

  const Parts parts_;
};

}  // namespace kvpool
