// Peers that go: lost, disconnected, or drained of what they wrote here.
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/service_impl.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

constexpr std::int64_t kDrainNs = 2'000'000'000;

}  // namespace

// Called when the link has ended: once for each session.
void ServiceImpl::on_session_lost(const SessionPointer& session, const std::shared_ptr<Link>& link,
                                  const std::shared_ptr<GroupConnection>& group) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;  // close() looks after it
  }
  // First this: should the peer come back, it is found among the peers or among the writer_quarantine.
  if (group == nullptr) {
    writer_quarantine_->add(session, link, routes_.exposure(session->peer(), link));
  } else {
    // Who writes here are the peer's ranks, and each rank of this instance knows when they write no more.
    const Error why(ErrorCode::kPeerLost, session->peer().name + " is lost");
    group->depart(why, [session] { session->on_writer_gone(); });
  }
  {
    const std::lock_guard lock(mutex_);
    const auto entry = peers_.find(session->peer().name);
    if (entry != peers_.end() && entry->second.session == session) {
      peers_.erase(entry);
      tell_lost(*session);
    }
    departed_.insert(session->peer().instance);
  }
  if (group != nullptr) return;
  // A pool of this process may have told that it writes no more before there was anybody to hear it.
  const PeerMetadata& peer = session->peer();
  const bool told = link->process() > 0;  // by the kernel; over TCP there is only the peer's word
  const bool here =
      told ? link->process() == getpid() : peer.pid == static_cast<std::uint64_t>(getpid()) && peer.host == host_id();
  if (here && !LocalServices::may_write(peer.epoch, epoch_)) writer_quarantine_->on_writer_gone(peer.epoch);
}

// Its part of every block is lost, and with it every block. What it had begun to write may be on its way, so nobody
// hears that this side writes no more: peers wait for the proof of each rank.
void ServiceImpl::on_rank_lost(const Error& why) {
  pool_.fail(
      Error(ErrorCode::kPeerLost, std::string(why.what()) + "; its part of every block is gone: make a new pool"));
  std::vector<SessionPointer> sessions;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) sessions.push_back(peer.session);
  }
  for (const SessionPointer& session : sessions) session->on_route_broken(why);
}

bool ServiceImpl::may_write_to(std::uint64_t epoch) noexcept {
  if (write_lost_.load()) return true;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      const Session& session = *peer.session;
      if (session.peer().epoch == epoch && !(session.lost() && session.writes_under_way() == 0)) return true;
    }
  }
  return writer_quarantine_->is_writing_to(epoch);
}

void ServiceImpl::disconnect(const std::string& name, const GivenUp& given_up) {
  Peer peer;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = peers_.find(name);
    if (entry == peers_.end()) throw Error(ErrorCode::kPeerLost, "there is no peer called '" + name + "'");
    peer = entry->second;
  }
  peer.session->stop_writing(Error(ErrorCode::kPeerLost, "the connection to " + name + " was closed here"));
  const Waiting waiting(monotonic_ns() + kDrainNs, given_up);
  const auto failure = failure_of([&] {
    while (peer.session->writes_under_way() > 0 && monotonic_ns() < waiting.until_ns) {
      usleep(1000);
      waiting.check();
    }
    if (peer.session->writes_under_way() == 0) peer.session->say_drained();
    // It answers when it writes nothing either; then nothing of it needs to be kept.
    const auto answered = [&] { return peer.session->peer_drained() || peer.session->link_ended(); };
    while (!peer.link->drive(waiting.slice_ns(monotonic_ns()), answered) && monotonic_ns() < waiting.until_ns) {
      waiting.check();
    }
  });
  peer.link->close(Error(ErrorCode::kPeerLost, "closed by " + options_.name));
  if (failure) throw Error(*failure);
}

void ServiceImpl::drained(Session& session) noexcept {
  // Should the link have ended, peers in other processes learn it from the end of this one, or when they meet us again.
  session.say_drained();
  if (session.by_ranks()) return;  // nobody believes it: see Session
  // Should they have met again, it would be taken for the end of that session's writes; its first word is the proof.
  if (!write_lost_.load() && !is_met_again(session)) LocalServices::tell_drained(session.peer().epoch, epoch_);
  writer_quarantine_->on_drained(session);
}

bool ServiceImpl::is_met_again(const Session& session) const noexcept {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(peers_, [&](const auto& entry) {
    const Session& other = *entry.second.session;
    return &other != &session && other.peer().epoch == session.peer().epoch;
  });
}

void ServiceImpl::on_peer_drained(std::uint64_t epoch) noexcept {
  std::vector<SessionPointer> sessions;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      if (peer.session->peer().epoch == epoch) sessions.push_back(peer.session);
    }
  }
  for (const SessionPointer& session : sessions) session->on_writer_gone();
  writer_quarantine_->on_writer_gone(epoch);
}

}  // namespace kvpool
