// Sessions that have ended while their peer may still write here. Blocks that they had promised stay in quarantine
// until it is proved that this incarnation no longer writes.
//
// The proofs: for writes of the peer's process, it has exited (its pidfd is readable); for writes of its GPU,
// kGpuGraceNs more have passed: see docs/invariants.md; for writes of UCX, the worker that served only this peer is
// closed. Or the peer has said so; or it has come back, which it does only after its earlier writes have ended.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvpool/exec/serial_executor.h"
#include "kvpool/net/link.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/transfer/departing_peer.h"

namespace kvpool {

class WriterQuarantine {
 public:
  static constexpr std::int64_t kGpuGraceNs = 500'000'000;
  // Of the class of tasks in which proofs are awaited, and deadlines watched (RankChannels): its work begins however
  // many writes wait for their peers. One thread is for a watch that goes on, one for proofs.
  static constexpr TaskLimits kWatchLimits{2, 64};

  // Both outlive it.
  WriterQuarantine(Reactor& reactor, SerialExecutor& watches) : reactor_(reactor), watches_(watches) {}

  // The link has ended; `exposure`: the access that its peer was given. Throws std::bad_alloc, and has noted nothing
  // then. A proof that cannot be awaited now is asked for again a second later, as is a fence that has proved nothing.
  void add(const std::shared_ptr<DepartingPeer>& session, const std::shared_ptr<Link>& link, Exposure exposure);
  // Throws kBusy while writes of an earlier connection to this incarnation, in either direction, are under way.
  void check_return(std::uint64_t incarnation) const;
  // Whether writes of an earlier connection to this incarnation are under way.
  bool is_writing_to(std::uint64_t incarnation) const noexcept;
  // The names of peers whose blocks wait for a proof. A new connection to one of them is a proof.
  std::vector<std::string> awaited() const;
  // The earlier writes of this incarnation have ended.
  void on_writer_gone(std::uint64_t incarnation) noexcept;
  // The writes of this side in this session have ended.
  void on_drained(const DepartingPeer& session) noexcept;
  // Ends the watch. Calls left(party, link) for each party without proof.
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
    std::shared_ptr<void> process;  // a separate pidfd, if the link has none
  };

  using Peers = std::list<QuarantinedPeer>;

  void fence(const std::shared_ptr<DepartingPeer>& session, const std::shared_ptr<Link>& link) noexcept;
  void watch(const std::shared_ptr<DepartingPeer>& session, const std::shared_ptr<Link>& link) noexcept;
  template <class Work>
  void run_soon(const Work& work) noexcept;
  void watch_process(const std::shared_ptr<DepartingPeer>& session, int pidfd);
  void find_process(const std::shared_ptr<DepartingPeer>& session);
  void on_exit(const std::shared_ptr<DepartingPeer>& session);
  void on_proof(const DepartingPeer& session, bool fenced) noexcept;
  template <class Which>
  Peers take(Which&& which) noexcept;
  Peers take_all() noexcept;
  void let_go(Peers&& peers) noexcept;

  Reactor& reactor_;
  SerialExecutor& watches_;  // for the end of what UCX writes
  mutable std::mutex mutex_;
  Peers writer_quarantine_;
};

}  // namespace kvpool
