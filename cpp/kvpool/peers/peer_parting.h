// The departure of peers: lost, disconnected, expelled, or drained of their writes.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/base/wait.h"
#include "kvpool/net/link.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

class PeerTable;
class Pool;
class RouteMaker;
class WriterQuarantine;

class PeerParting {
 public:
  // `name` is the pool's. The references outlive it.
  PeerParting(Pool& pool, PeerTable& table, WriterQuarantine& writer_quarantine, const RouteMaker& routes,
              std::string name, std::uint64_t incarnation);

  // Ends the connection when the writes of both sides have ended, or after 2 s. Throws kPeerLost, kCancelled.
  void disconnect(const std::string& name, const GivenUp& given_up);
  // Ends the sessions with this incarnation.
  void part_from(std::uint64_t incarnation, const Error& why);
  // This pool has lost its lease: ends all sessions. Waits shortly for writes in progress.
  void fence(const std::string& why);

  // Called once for each session, when its link has ended.
  void on_session_lost(const std::shared_ptr<Session>& session, const std::shared_ptr<Link>& link,
                       const std::shared_ptr<GroupConnection>& group);
  // A rank of this instance is lost, with its part of every block, so every block is lost.
  void on_rank_lost(const Error& why);
  // The writes of this side in a session that has ended are over.
  void drained(Session& session) noexcept;
  // The GPU is lost: writes that it was given may never end.
  void write_lost() noexcept { write_lost_.store(true); }
  bool is_write_lost() const noexcept { return write_lost_.load(); }

  // --- for peers in this process: see local_services.h --- The peer with this incarnation no longer writes here.
  void on_peer_drained(std::uint64_t incarnation) noexcept;
  // Whether this pool may still write to the peer with this incarnation; if so, it tells the peer when that ends.
  bool may_write_to(std::uint64_t incarnation) noexcept;

 private:
  Pool& pool_;
  PeerTable& table_;
  WriterQuarantine& writer_quarantine_;
  const RouteMaker& routes_;
  const std::string name_;
  const std::uint64_t incarnation_;
  std::atomic<bool> write_lost_{false};
};

}  // namespace kvpool
