// Pings quiet peers and closes links whose peer is silent for a lease, with one timer for all links of an endpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/net/reactor.h"
#include "kvpool/net/sock_link.h"

namespace kvpool {

// Sends a ping on a link that has received nothing, or sent nothing, for about a third of the lease. Closes a link that
// has received nothing for the whole lease, with kPeerLost. It holds links by weak_ptr only, and lives until the last
// of them is closed. The reactor outlives it.
class LinkKeepalive : public std::enable_shared_from_this<LinkKeepalive> {
 public:
  LinkKeepalive(Reactor& reactor, std::int64_t lease_ns) noexcept : reactor_(reactor), lease_ns_(lease_ns) {}
  void add(const std::shared_ptr<SockLink>& link);

 private:
  void tick() noexcept;
  std::int64_t look_at(SockLink& link, std::int64_t now) noexcept;
  void tick_at(std::int64_t at_ns);

  Reactor& reactor_;
  const std::int64_t lease_ns_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<SockLink>> links_;
  bool ticking_ = false;
};

}  // namespace kvpool
