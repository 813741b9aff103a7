// What the application hears of its peers: events, and who is there.
#include <algorithm>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/service_impl.h"

namespace kvpool {

// The peers that are here, first, so that none is missed.
int ServiceImpl::begin_peer_events() {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  const int descriptor = events_.begin();
  for (const auto& [name, peer] : peers_) tell_joined(peer.session->peer());
  return descriptor;
}

// REQUIRES: mutex_ is held, as for the next, so that events come in the order of what they tell.
void ServiceImpl::tell_joined(const PeerMetadata& metadata) {
  events_.push({metadata.name, metadata.instance, metadata.epoch, PeerEvent::Kind::kJoined, {}});
}

void ServiceImpl::tell_lost(const Session& session) {
  const PeerMetadata& metadata = session.peer();
  Error why(ErrorCode::kPeerLost, "a newer process has come under the name " + metadata.name);
  if (session.lost()) why = *failure_of([&] { session.throw_lost(); });
  events_.push({metadata.name, metadata.instance, metadata.epoch, PeerEvent::Kind::kLost, std::move(why)});
}

std::vector<PeerInfo> ServiceImpl::peers() {
  std::vector<PeerInfo> list;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, peer] : peers_) {
    if (peer.session->lost()) continue;
    const PeerMetadata& metadata = peer.session->peer();
    const ReceiverCounts counts = peer.session->counts();
    list.push_back({name, metadata.instance, metadata.epoch, peer.link->describe(), peer.session->route_names(),
                    metadata.pid, counts.lent, peer.session->borrowed_blocks(), counts.reserved,
                    peer.session->under_way(), peer.session->route_failures(), peer.session->route_prices()});
  }
  std::sort(list.begin(), list.end(), [](const PeerInfo& a, const PeerInfo& b) { return a.name < b.name; });
  return list;
}

}  // namespace kvpool
