// Sessions that have ended while their peer may still write here: what they had promised stays in quarantine until it
// is proved that nothing of that incarnation writes any more.
//
// The proofs: the peer's process has exited (its pidfd is readable), for what its process writes; for what a GPU writes
// that it had set to work, kGpuGraceNs later: see docs/invariants.md; the worker that UCX
// had for this peer alone is closed, for what UCX writes; or the peer has said so, or has come back, which it does only
// when it has ended what it wrote before.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/exec/worker_pool.h"
#include "kvpool/net/link.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/transfer/departing_peer.h"

namespace kvpool {

class WriterQuarantine {
 public:
  static constexpr std::int64_t kGpuGraceNs = 500'000'000;

  // Both outlive it.
  WriterQuarantine(Reactor& reactor, WorkerPool& workers) : reactor_(reactor), workers_(workers) {}

  // The link has ended; `exposure` is what its peer was given.
  void add(const std::shared_ptr<DepartingPeer>& session, const std::shared_ptr<Link>& link, Exposure exposure);
  // Throws kBusy as long as writes of an earlier connection to this incarnation, in either direction, are under way.
  void check_return(std::uint64_t incarnation) const;
  // Whether writes to this incarnation, of an earlier connection, are under way.
  bool is_writing_to(std::uint64_t incarnation) const noexcept;
  // This incarnation writes nothing that it began before.
  void on_writer_gone(std::uint64_t incarnation) noexcept;
  // Nothing of this side is under way any more in this session.
  void on_drained(const DepartingPeer& session) noexcept;
  // Ends the watch. Calls left(party, link) for each whose proof has not come.
  template <class Left>
  void clear(Left&& left) {
    for (const QuarantinedPeer& quarantined_peer : take_all()) {
      if (quarantined_peer.watch != 0) reactor_.unwatch(quarantined_peer.watch);
      if (quarantined_peer.missing > 0 || quarantined_peer.fencing)
        left(quarantined_peer.session, quarantined_peer.link);
    }
  }

 private:
  struct QuarantinedPeer {
    std::shared_ptr<DepartingPeer> session;
    std::shared_ptr<Link> link;  // owns the pidfd
    int missing = 0;             // proofs
    bool fencing = false;
    bool by_gpu = false;
    std::uint64_t watch = 0;
    std::shared_ptr<void> process;  // a pidfd of our own, where the link has none
  };

  void watch_process(const std::shared_ptr<DepartingPeer>& session, int pidfd);
  void find_process(const std::shared_ptr<DepartingPeer>& session);
  void on_exit(const std::shared_ptr<DepartingPeer>& session);
  void on_proof(const DepartingPeer& session, bool fenced) noexcept;
  template <class Which>
  std::vector<QuarantinedPeer> take(Which&& which) noexcept;
  std::vector<QuarantinedPeer> take_all() noexcept;
  void let_go(std::vector<QuarantinedPeer>&& writer_quarantine) noexcept;

  Reactor& reactor_;
  WorkerPool& workers_;
  mutable std::mutex mutex_;
  std::vector<QuarantinedPeer> writer_quarantine_;
};

}  // namespace kvpool
