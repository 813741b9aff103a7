// Sessions that have ended while their peer may still write here: what they had promised stays in quarantine until it
// is proved that nothing of that incarnation writes any more.
//
// The proofs: the peer's process has exited (its pidfd is readable), for what its process writes; for what a GPU writes
// that it had set to work, kGpuSettleNs later: see docs/invariants.md; the worker that UCX
// had for this peer alone is closed, for what UCX writes; or the peer has said so, or has come back, which it does only
// when it has ended what it wrote before.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/pool/route_maker.h"
#include "kvpool/pool/workers.h"
#include "kvpool/transfer/parted.h"
#include "kvpool/transport/link.h"
#include "kvpool/transport/reactor.h"

namespace kvpool {

class Ghosts {
 public:
  static constexpr std::int64_t kGpuSettleNs = 500'000'000;

  // Both outlive it.
  Ghosts(Reactor& reactor, Workers& workers) : reactor_(reactor), workers_(workers) {}

  // The link has ended; `exposure` is what its peer was given.
  void add(const std::shared_ptr<Parted>& session, const std::shared_ptr<Link>& link, RouteMaker::Exposure exposure);
  // Throws kBusy as long as writes of an earlier connection to this incarnation, in either direction, are under way.
  void check_return(std::uint64_t epoch) const;
  // Whether writes to this incarnation, of an earlier connection, are under way.
  bool is_writing_to(std::uint64_t epoch) const noexcept;
  // This incarnation writes nothing that it began before.
  void on_writer_gone(std::uint64_t epoch) noexcept;
  // Nothing of this side is under way any more in this session.
  void on_drained(const Parted& session) noexcept;
  // Ends the watch. Calls left(party, link) for each whose proof has not come.
  template <class Left>
  void clear(Left&& left) {
    for (const Ghost& ghost : take_all()) {
      if (ghost.watch != 0) reactor_.unwatch(ghost.watch);
      if (ghost.missing > 0 || ghost.fencing) left(ghost.session, ghost.link);
    }
  }

 private:
  struct Ghost {
    std::shared_ptr<Parted> session;
    std::shared_ptr<Link> link;  // owns the pidfd
    int missing = 0;             // proofs
    bool fencing = false;
    bool by_gpu = false;
    std::uint64_t watch = 0;
    std::shared_ptr<void> process;  // a pidfd of our own, where the link has none
  };

  void watch_process(const std::shared_ptr<Parted>& session, int pidfd);
  void find_process(const std::shared_ptr<Parted>& session);
  void on_exit(const std::shared_ptr<Parted>& session);
  void on_proof(const Parted& session, bool fenced) noexcept;
  template <class Which>
  std::vector<Ghost> take(Which&& which) noexcept;
  std::vector<Ghost> take_all() noexcept;
  void let_go(std::vector<Ghost>&& ghosts) noexcept;

  Reactor& reactor_;
  Workers& workers_;
  mutable std::mutex mutex_;
  std::vector<Ghost> ghosts_;
};

}  // namespace kvpool
