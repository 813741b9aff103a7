#include "kvpool/peers/peer_parting.h"

#include <unistd.h>

#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/late_writers.h"
#include "kvpool/peers/local_services.h"
#include "kvpool/peers/peer_table.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/peers/writer_quarantine.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

constexpr std::int64_t kDrainNs = 2'000'000'000;
constexpr std::int64_t kFenceDrainNs = 100'000'000;

// Whether the peer is a pool of this process. Over TCP there is only its word, else the kernel's.
bool is_here(const PeerMetadata& peer, const Link& link) {
  if (link.process() > 0) return link.process() == getpid();
  return peer.pid == static_cast<std::uint64_t>(getpid()) && peer.host == host_id();
}

}  // namespace

PeerParting::PeerParting(Pool& pool, PeerTable& table, WriterQuarantine& writer_quarantine, const RouteMaker& routes,
                         std::string name, std::uint64_t incarnation)
    : pool_(pool),
      table_(table),
      writer_quarantine_(writer_quarantine),
      routes_(routes),
      name_(std::move(name)),
      incarnation_(incarnation) {}

void PeerParting::on_session_lost(const std::shared_ptr<Session>& session, const std::shared_ptr<Link>& link,
                                  const std::shared_ptr<GroupConnection>& group) {
  if (table_.closed()) return;  // Service::close() looks after it
  // First this: should the peer come back, it is found among the peers or in quarantine.
  if (group == nullptr) {
    writer_quarantine_.add(session, link, routes_.exposure(session->peer(), link));
  } else {
    // The peer's ranks write here, and each rank of this instance knows when they write no more.
    const Error why(ErrorCode::kPeerLost, session->peer().name + " is lost");
    group->depart(why, [session] { session->on_writer_gone(); });
  }
  table_.remove(session);
  if (group != nullptr) return;
  // A pool of this process may have told that it writes no more before there was anybody to hear it.
  const PeerMetadata& peer = session->peer();
  if (is_here(peer, *link) && !LocalServices::may_write(peer.incarnation, incarnation_)) {
    writer_quarantine_.on_writer_gone(peer.incarnation);
  }
}

// What the rank had begun to write may be on its way, so nobody hears that this side writes no more: peers wait for the
// proof of each rank.
void PeerParting::on_rank_lost(const Error& why) {
  pool_.fail(
      Error(ErrorCode::kPeerLost, std::string(why.what()) + "; its part of every block is gone: make a new pool"));
  for (const PeerTable::Peer& peer : table_.all()) peer.session->on_route_broken(why);
}

bool PeerParting::may_write_to(std::uint64_t incarnation) noexcept {
  return is_write_lost() || table_.may_write_to(incarnation) || writer_quarantine_.is_writing_to(incarnation);
}

void PeerParting::disconnect(const std::string& name, const GivenUp& given_up) {
  const PeerTable::Peer peer = table_.at(name);
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
  peer.link->close(Error(ErrorCode::kPeerLost, "closed by " + name_));
  if (failure) throw Error(*failure);
}

void PeerParting::part_from(std::uint64_t incarnation, const Error& why) {
  for (const PeerTable::Peer& peer : table_.all()) {
    if (peer.session->peer().incarnation == incarnation) peer.link->close(why);
  }
}

void PeerParting::fence(const std::string& why) {
  const std::vector<PeerTable::Peer> peers = table_.fence(why);
  const Error lost(ErrorCode::kPeerLost, why);
  for (const PeerTable::Peer& peer : peers) peer.session->stop_writing(lost);
  // A peer that hears that nothing is written there any more needs no quarantine.
  const std::int64_t until = monotonic_ns() + kFenceDrainNs;
  for (const PeerTable::Peer& peer : peers) {
    if (wait_until(until, [&] { return peer.session->writes_under_way() == 0; })) peer.session->say_drained();
    peer.link->close(lost);
  }
}

void PeerParting::drained(Session& session) noexcept {
  // Should the link have ended, peers in other processes learn it from the end of this one, or when they meet us again.
  session.say_drained();
  if (session.by_ranks()) return;  // nobody believes it: see Session
  // Should they have met again, it would be taken for the end of that session's writes; its first word is the proof.
  if (!is_write_lost() && !table_.is_met_again(session))
    LocalServices::tell_drained(session.peer().incarnation, incarnation_);
  writer_quarantine_.on_drained(session);
}

void PeerParting::on_peer_drained(std::uint64_t incarnation) noexcept {
  for (const PeerTable::Peer& peer : table_.all()) {
    if (peer.session->peer().incarnation == incarnation) peer.session->on_writer_gone();
  }
  writer_quarantine_.on_writer_gone(incarnation);
}

}  // namespace kvpool
