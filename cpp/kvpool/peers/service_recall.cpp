// Blocks that are lent unasked; lent blocks that are recalled: by this side, and by a peer.
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/peers/service.h"

namespace kvpool {

// Nobody is met for it: who is not connected has nothing of this pool.
std::shared_ptr<Session> Service::borrower(const std::string& peer) const {
  std::shared_ptr<Session> session = table_.find(peer);
  if (session == nullptr) throw Error(ErrorCode::kPeerLost, "there is no peer called '" + peer + "'");
  return session;
}

void Service::lend(const std::string& peer, std::vector<Address> addresses, const Waiting& waiting) {
  caller_->reach(peer, waiting.until_ns, waiting.given_up)->lend(std::move(addresses), waiting);
}

RecallResult Service::recall(const std::string& peer, std::vector<Address> addresses, const Waiting& waiting) {
  return borrower(peer)->recall(std::move(addresses), waiting);
}

RecallResult Service::recall(const std::string& peer, std::size_t count, const Waiting& waiting) {
  return borrower(peer)->recall_some(count, waiting);
}

// Without memory for the event the application hears nothing, and the loans end at their deadline.
void Service::recalled(Session& session, const std::vector<Address>& addresses, std::int64_t deadline_ns) noexcept {
  const PeerMetadata& peer = session.peer();
  static_cast<void>(failure_of([&] {
    events_.push(
        {peer.name, peer.instance, peer.incarnation, PeerEvent::Kind::kRecalled, std::nullopt, addresses, deadline_ns});
  }));
}

}  // namespace kvpool
