// How peers go: lost, disconnected, expelled, or drained of what they wrote here.
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
  // Of the pool with this name and incarnation. All but the name outlive it.
  PeerParting(Pool& pool, PeerTable& table, WriterQuarantine& writer_quarantine, const RouteMaker& routes,
              std::string name, std::uint64_t incarnation);

  // Ends the connection when both sides have ended what they write, or 2 s later. Throws kPeerLost, kCancelled.
  void disconnect(const std::string& name, const GivenUp& given_up);
  // Ends the sessions with this incarnation.
  void part_from(std::uint64_t incarnation, const Error& why);
  // This pool has lost its lease: ends all sessions. Waits shortly for writes that are under way.
  void fence(const std::string& why);

  // The link of this session has ended: called once for each.
  void on_session_lost(const std::shared_ptr<Session>& session, const std::shared_ptr<Link>& link,
                       const std::shared_ptr<GroupConnection>& group);
  // A rank of this instance is lost: its part of every block, and with it every block.
  void on_rank_lost(const Error& why);
  // Nothing of this side is under way any more in a session that has ended.
  void drained(Session& session) noexcept;
  // What a lost GPU was told to write may be on its way for ever.
  void write_lost() noexcept { write_lost_.store(true); }
  bool is_write_lost() const noexcept { return write_lost_.load(); }

  // --- of a peer in this process: see local_services.h ---
  // The peer with this incarnation writes nothing here any more.
  void on_peer_drained(std::uint64_t incarnation) noexcept;
  // Whether this pool may still write to the peer with this incarnation; it tells when that is over.
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
