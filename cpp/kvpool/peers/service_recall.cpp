// Lent blocks that are recalled: by this side, and by a peer.
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/peers/service_impl.h"

namespace kvpool {

// Nobody is met for it: who is not connected has nothing of this pool.
ServiceImpl::SessionPointer ServiceImpl::borrower(const std::string& peer) const {
  SessionPointer session = find(peer);
  if (session == nullptr) throw Error(ErrorCode::kPeerLost, "there is no peer called '" + peer + "'");
  return session;
}

RecallResult ServiceImpl::recall(const std::string& peer, std::vector<Address> addresses, const Waiting& waiting) {
  return borrower(peer)->recall(std::move(addresses), waiting);
}

RecallResult ServiceImpl::recall(const std::string& peer, std::size_t count, const Waiting& waiting) {
  return borrower(peer)->recall_some(count, waiting);
}

// Without memory for the event the application hears nothing, and the loans end at their deadline.
void ServiceImpl::recalled(Session& session, const std::vector<Address>& addresses, std::int64_t deadline_ns) noexcept {
  const PeerMetadata& peer = session.peer();
  static_cast<void>(failure_of([&] {
    events_.push(
        {peer.name, peer.instance, peer.epoch, PeerEvent::Kind::kRecalled, std::nullopt, addresses, deadline_ns});
  }));
}

}  // namespace kvpool
