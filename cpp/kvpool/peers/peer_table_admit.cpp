// Admission of peers to the table.
#include <algorithm>
#include <new>
#include <utility>

#include "kvpool/peers/peer_table.h"
#include "kvpool/peers/writer_quarantine.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

constexpr std::int64_t kWritingRetryAfterUs = 10'000;
constexpr std::int64_t kFencedRetryAfterUs = 100'000;

}  // namespace

PeerTable::Peer PeerTable::admit(Peer peer, const WriterQuarantine& writer_quarantine) {
  const PeerMetadata& metadata = peer.session->peer();
  const bool initiated_here = peer.initiator == incarnation_;
  Peer before;
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(initiated_here ? ErrorCode::kClosed : ErrorCode::kPeerLost, "the pool is closed");
  check_membership(metadata, initiated_here);
  check_instance(metadata);
  const auto known = peers_.find(metadata.name);
  if (known != peers_.end() && known->second.session->peer().incarnation == metadata.incarnation) {
    check_replaces(known->second, metadata, initiated_here);
  }
  // A peer may only come back after both sides have ended their earlier writes.
  writer_quarantine.check_return(metadata.incarnation);
  if (initiated_here) {
    std::erase_if(met_, [](const auto& entry) { return entry.first.expired(); });
    met_[peer.link] = metadata.incarnation;
  }
  show_instance();
  if (known != peers_.end()) before = known->second;
  const bool first = instances_.insert(metadata.instance).second;
  try {
    peers_.insert_or_assign(metadata.name, peer);
  } catch (const std::bad_alloc&) {
    if (first) instances_.erase(metadata.instance);
    throw;
  }
  const bool goes_on = before.session != nullptr && before.session->peer().incarnation == metadata.incarnation &&
                       !before.session->lost();
  if (before.session != nullptr && !goes_on) tell_lost(*before.session);
  if (!goes_on) tell_joined(metadata);
  return before;
}

std::uint64_t PeerTable::take_met(const std::shared_ptr<Link>& link) {
  const std::lock_guard lock(mutex_);
  const auto noted = met_.extract(link);
  return noted ? noted.mapped() : 0;
}

std::shared_ptr<Link> PeerTable::half_open(const PeerMetadata& metadata) const {
  const std::lock_guard lock(mutex_);
  const auto known = peers_.find(metadata.name);
  if (known == peers_.end()) return nullptr;
  const Peer& peer = known->second;
  const bool alive = peer.session->peer().incarnation == metadata.incarnation && peer.initiator == incarnation_ &&
                     !peer.session->lost();
  return alive ? peer.link : nullptr;
}

// REQUIRES: mutex_ is held.
void PeerTable::check_membership(const PeerMetadata& metadata, bool initiated_here) const {
  if (fenced_) {
    // The directory tells the caller soon, or the lease is regained and the caller is admitted.
    if (initiated_here) throw Error(*fenced_);
    throw Error(ErrorCode::kBusy, name_ + " admits no peer: " + fenced_->what(),
                {{"retry_after_us", kFencedRetryAfterUs}});
  }
  const auto why = book_.expelled(metadata.incarnation);
  if (!why) return;
  const Error refusal(initiated_here ? ErrorCode::kPeerLost : ErrorCode::kBusy,
                      "to " + name_ + " this incarnation of " + metadata.name + " is dead (" + *why +
                          ") until its cluster names it again",
                      {{"retry_after_us", kFencedRetryAfterUs}});
  // A peer to which blocks were promised here must learn that it no longer has them.
  if (has_departed(metadata.instance)) throw refusal.because(ErrorCause::kDropped, metadata.incarnation);
  throw Error(refusal);
}

// Whether a peer with this id was connected and is no longer. REQUIRES: mutex_ is held.
bool PeerTable::has_departed(std::uint32_t instance) const {
  return instances_.contains(instance) && std::ranges::none_of(peers_, [&](const auto& entry) {
           return entry.second.session->peer().instance == instance;
         });
}

// REQUIRES: mutex_ is held.
void PeerTable::check_instance(const PeerMetadata& metadata) const {
  bool taken = metadata.instance == instance_locked();
  for (const auto& [name, peer] : peers_) {
    const PeerMetadata& other = peer.session->peer();
    // Blocks carry their owner's incarnation, so no two peers may have the same.
    taken = taken || (name != metadata.name &&
                      (other.instance == metadata.instance || other.incarnation == metadata.incarnation));
  }
  if (taken) {
    throw Error(ErrorCode::kState, "instance id " + std::to_string(metadata.instance) + " is taken by another peer",
                {{"instance", metadata.instance}})
        .because(ErrorCause::kInstanceTaken);
  }
}

// Returns if a new connection to a connected peer replaces the existing one. Otherwise throws kState
// (kConnectedAlready) with the incarnation of the side that was called. REQUIRES: mutex_ is held.
//
// The server refuses first, so there are two connections only if both sides call at the same moment and each admits the
// other's call before its own is answered. Then both keep the connection of the side with the lower incarnation.
void PeerTable::check_replaces(const Peer& known, const PeerMetadata& metadata, bool initiated_here) const {
  if (known.session->lost()) {
    if (known.session->writes_under_way() == 0) return;
    throw Error(ErrorCode::kBusy, "writes of an earlier connection to " + metadata.name + " are not over",
                {{"retry_after_us", kWritingRetryAfterUs}});
  }
  if (initiated_here && known.initiator == metadata.incarnation && incarnation_ < metadata.incarnation) return;
  throw Error(ErrorCode::kState, name_ + " and " + metadata.name + " are connected already")
      .because(ErrorCause::kConnectedAlready, initiated_here ? metadata.incarnation : incarnation_);
}

}  // namespace kvpool
