// The peers of a pool: who is there, and who may come in. One lock guards both, so that nobody slips in between a check
// and what follows from it.
//
//   M1  An incarnation that was expelled has no session here, and gets none, before the directory names it again.
//   M2  A pool that is fenced has no session, and gets none.
//   M3  A pool that calls a peer which has dropped it learns so: the refusal says so (kDropped), with the caller's own
//       incarnation. A peer that never had a session with it refuses without: it has taken nothing from the caller.
// For M1 and M2 the change is made here before the sessions are looked for that are to end.
//
// Thread-safety: all of it. Under the lock nothing of a session is called but what it tells of itself.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/net/link.h"
#include "kvpool/peers/address_book.h"
#include "kvpool/peers/instance_id.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/peers/peer_events.h"
#include "kvpool/peers/peer_info.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

class Pool;
class WriterQuarantine;

class PeerTable {
 public:
  struct Peer {
    std::shared_ptr<Session> session;
    std::shared_ptr<Link> link;
    std::uint64_t initiator = 0;             // incarnation of the side that connected
    std::shared_ptr<GroupConnection> group;  // when blocks go between ranks, not over this link
  };

  // Of the pool with this name and incarnation. `joins`: it is fenced, and has no instance id, before join(). All but
  // the name outlive it.
  PeerTable(Pool& pool, PeerEvents& events, const AddressBook& book, std::string name, std::uint64_t incarnation,
            bool joins);

  // --- who is there ---
  // Null when there is none of this name. Throws kFenced, kClosed, and what the pool has failed with.
  std::shared_ptr<Session> find(const std::string& name) const;
  // Throws kPeerLost.
  Peer at(const std::string& name) const;
  std::vector<Peer> all() const;
  // Whether writes to this incarnation are under way, or may begin.
  bool may_write_to(std::uint64_t incarnation) const noexcept;
  // Whether the peer of this session is there by another one.
  bool is_met_again(const Session& session) const noexcept;
  // The name of a peer that is connected; "" for none. `confirmed`: by a connection that both sides are known to have
  // admitted.
  std::string name_of(std::uint64_t incarnation, bool confirmed = false) const;
  std::string name_of_instance(std::uint32_t instance) const;
  std::string names() const;  // for people: "a, b"; "" when there is none
  std::shared_ptr<GroupConnection> group_by(const std::shared_ptr<Link>& link) const;
  // Whose blocks have this instance id. Null for a peer that is gone: what it had lent is gone with it. Nothing for an
  // id that no peer has or had. Throws kClosed.
  std::optional<std::shared_ptr<Session>> lender(std::uint32_t instance) const;
  // For the application.
  std::vector<PeerInfo> list() const;
  // The peers that are here come first, so that none is missed. Throws kClosed, and as PeerEvents::begin.
  int begin_events();

  // --- who comes ---
  // The link of an earlier connection to this peer that this side made, and which still looks alive here; null if there
  // is none.
  std::shared_ptr<Link> half_open(const PeerMetadata& metadata) const;
  // Adds the peer, whose link is initiator's, and returns what was in its place. Throws why it is not let in.
  Peer admit(Peer peer, const WriterQuarantine& writer_quarantine);
  // The incarnation of the peer that this side has met by this link, once; 0 if it has met none.
  std::uint64_t take_met(const std::shared_ptr<Link>& link);

  // --- who goes ---
  // The session has ended. What it had lent is gone.
  void remove(const std::shared_ptr<Session>& session);
  // Ends what is admitted; returns those that were there at the first call, nothing at later ones.
  std::optional<std::vector<Peer>> close();
  bool closed() const;
  void clear() noexcept;  // after close()

  // --- this pool's instance id ---
  std::uint32_t instance() const;  // the one that it has, or proposes
  // Callers may hear the proposed id between the two; the pool has it from the end of the first that was `bound`.
  void begin_listen();
  void end_listen(bool bound);
  // Another peer has the id that was proposed. Another is proposed, unless somebody may have seen an address with it
  // already: then it returns false.
  bool propose_another();

  // --- this pool's lease ---
  void join(std::uint32_t instance);  // throws kClosed
  // Both return at once; the caller ends the sessions with those that are returned.
  std::vector<Peer> fence(const std::string& why);
  void unfence();
  void check_unfenced() const;  // throws kFenced
  // A call was refused: perhaps by a peer that has dropped this incarnation.
  void note_refusal(const Error& why);
  std::string dropped_by() const;

 private:
  void check_membership(const PeerMetadata& metadata, bool initiated_here) const;
  void check_instance(const PeerMetadata& metadata) const;
  void check_rival(const Peer& known, const PeerMetadata& metadata, bool initiated_here) const;
  void tell_joined(const PeerMetadata& metadata);
  void tell_lost(const Session& session);
  std::uint32_t instance_locked() const;

  Pool& pool_;
  PeerEvents& events_;
  const AddressBook& book_;
  const std::string name_;
  const std::uint64_t incarnation_;

  mutable std::mutex mutex_;  // guards all that follows
  bool closed_ = false;
  bool joining_;                  // the instance id is still to come
  std::optional<Error> fenced_;   // what is thrown meanwhile
  std::string dropped_by_;        // what the peer said
  InstanceId proposed_instance_;  // which no pool of this process proposes, as long as this one is there
  int listening_ = 0;
  std::unordered_map<std::string, Peer> peers_;
  std::map<std::weak_ptr<Link>, std::uint64_t, std::owner_less<>> met_;  // incarnations
  std::unordered_set<std::uint32_t> departed_;                           // instance ids of peers that were here
};

}  // namespace kvpool
