// The end of a service: everything that could still touch the pool's memory ends first, or is proved to have, or the
// memory is kept.
#include <algorithm>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/late_writers.h"
#include "kvpool/peers/local_services.h"
#include "kvpool/peers/retained_memory.h"
#include "kvpool/peers/service.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

constexpr std::int64_t kDrainNs = 2'000'000'000;
constexpr std::int64_t kHeardNs = 500'000'000;  // for a peer's answer that nobody needs but to know that it has heard

}  // namespace

// Each side hears, as far as it answers in time, that the other writes no more; then the links end.
void Service::end_sessions(const std::vector<PeerTable::Peer>& peers) noexcept {
  const Error why(ErrorCode::kClosed, "the pool is closed");
  for (const PeerTable::Peer& peer : peers) peer.session->stop_writing(why);
  const std::int64_t until = monotonic_ns() + kDrainNs;
  for (const PeerTable::Peer& peer : peers) {
    if (wait_until(until, [&] { return peer.session->writes_under_way() == 0; })) peer.session->say_drained();
  }
  for (const PeerTable::Peer& peer : peers) {
    // What such a peer writes goes to memory of this process that is about to be given back: it is asked to end. The
    // others answer, too. That this side writes no more may wait behind another thread's frame, and would be lost with
    // the link: then the peer keeps blocks apart until this process ends.
    const Exposure exposure = routes_.exposure(peer.session->peer(), peer.link);
    const bool must_end = exposure.by_address || exposure.by_handle || exposure.until_fence;
    const std::int64_t answer_ns = must_end ? until : std::min(until, monotonic_ns() + kHeardNs);
    if (must_end || peer.group == nullptr) {
      const auto answered = [&] { return peer.session->peer_drained() || peer.session->link_ended(); };
      static_cast<void>(peer.link->drive(answer_ns, answered));
    }
    peer.link->close(why);
  }
}

void Service::close() noexcept {
  const auto peers = table_.close();
  if (!peers) return;
  endpoint_->close();
  received_.close();
  events_.close();
  end_sessions(*peers);
  ranks_->close();
  std::vector<Left> left;
  for (const PeerTable::Peer& peer : *peers) {
    if (peer.group == nullptr) left.push_back({peer.session, peer.link});
  }
  lent_attends_.stop();
  steps_.stop();
  writes_.stop();
  waits_.stop();
  ranks_->stop();
  watches_.stop();
  receives_.stop();
  reactor_->stop();
  LocalServices::remove(incarnation_, parting_.is_write_lost());
  drop_received();
  let_go_of_memory(std::move(left));
  for (const PeerTable::Peer& peer : *peers) peer.session->forget_readers();
  table_.clear();
}

// The memory goes with the pool's own hold on it, unless somebody may still write to where it is.
void Service::let_go_of_memory(std::vector<Left> left) noexcept {
  // Who was connecting has heard that the pool is closed, and passes on descriptors of the memory no more. It may be
  // this very thread, in a signal's handler that closes the pool.
  wait_until(monotonic_ns() + kDrainNs, [this] { return !caller_->calls(); });
  // Every link has ended by now, and made a quarantined peer of who has not said that it writes no more.
  writer_quarantine_.clear([&](const std::shared_ptr<DepartingPeer>& party, const std::shared_ptr<Link>& link) {
    left.push_back({party, link});
  });
  std::vector<LateWriter> late;
  for (const Left& one : left) add_late_writer(routes_, one.party, one.link, late);
  if (!late.empty()) RetainedMemory::keep(blocks_.keepalive(), std::move(late));
  routes_.let_go();
  blocks_.let_go();
}

// What the application never asked for keeps nothing pinned, and no blocks: the pool may go on without its service. But
// the application may have learnt the addresses from the sender, and have freed or cached some: free() knows, and is
// asked for each, as it frees all or nothing.
void Service::drop_received() noexcept {
  try {
    while (const auto item = received_.pop(0)) {
      if (item->pin.node != nullptr) pool_.unpin(&item->pin, 1);
      if (item->inserted || item->lent) continue;
      for (const Address& address : item->addresses) static_cast<void>(failure_of([&] { pool_.free(&address, 1); }));
    }
  } catch (const Error&) {  // closed, and empty
    return;
  }
}

}  // namespace kvpool
