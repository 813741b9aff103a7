// The peers of a pool, and the rules that admit them. One lock guards both, so nothing changes between a check and the
// admission that follows from it.
//
//   M1  An expelled incarnation has no session here, and gets none before the directory lists it again.
//   M2  A fenced pool has no session, and gets none.
//   M3  If a pool calls a peer that has dropped it, the refusal says so (kDropped), with the caller's incarnation. A
//       peer that never had a session with the caller refuses without kDropped: it has taken nothing from the caller.
// For M1 and M2 the table changes first; then the caller looks for the sessions to end.
//
// Thread-safety: all of it. Under the lock, only getters of a session are called.
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
    std::shared_ptr<GroupConnection> group;  // null unless blocks travel between ranks, not over this link
  };

  // `name` and `incarnation` are the pool's. `joins`: before join() it is fenced and has no instance id. The references
  // outlive it.
  PeerTable(Pool& pool, PeerEvents& events, const AddressBook& book, std::string name, std::uint64_t incarnation,
            bool joins);

  // --- connected peers --- Null when no connected peer has this name. Throws kFenced, kClosed, and the error with
  // which the pool has failed.
  std::shared_ptr<Session> find(const std::string& name) const;
  // Throws kPeerLost.
  Peer at(const std::string& name) const;
  // Null when no connected peer has this name.
  std::shared_ptr<Link> link_to(const std::string& name) const;
  std::vector<Peer> all() const;
  // Whether writes to this incarnation are under way, or may begin.
  bool may_write_to(std::uint64_t incarnation) const noexcept;
  // Whether the peer of this session is connected by another session.
  bool is_met_again(const Session& session) const noexcept;
  // The name of a connected peer; "" for none. `confirmed`: only if both sides are known to have admitted the
  // connection.
  std::string name_of(std::uint64_t incarnation, bool confirmed = false) const;
  std::string name_of_instance(std::uint32_t instance) const;
  std::string names() const;  // for messages: "a, b"; "" without peers
  std::shared_ptr<GroupConnection> group_by(const std::shared_ptr<Link>& link) const;
  // The peer whose blocks have this instance id. Null if it was lost, and with it the blocks that it had lent. Nullopt
  // for an id that no peer has or had. Throws kClosed.
  std::optional<std::shared_ptr<Session>> lender(std::uint32_t instance) const;
  // For the application.
  std::vector<PeerInfo> list() const;
  // Events of the connected peers come first, so that none is missed. Throws kClosed, and as PeerEvents::begin.
  int begin_events();

  // --- admission --- The link of an earlier connection to this peer that this side made and still considers alive;
  // null if there is no such link.
  std::shared_ptr<Link> half_open(const PeerMetadata& metadata) const;
  // Adds the peer and returns the one that it replaces. Throws why the peer is refused, or std::bad_alloc; then the
  // peers are as before.
  Peer admit(Peer peer, const WriterQuarantine& writer_quarantine);
  // Takes the incarnation of the peer to which this side has connected by this link; 0 if it has not.
  std::uint64_t take_met(const std::shared_ptr<Link>& link);

  // --- departure --- The session has ended, and blocks that its peer had lent are lost.
  void remove(const std::shared_ptr<Session>& session) noexcept;
  // Admits no peer from now on. The first call returns the connected peers, later ones nullopt.
  std::optional<std::vector<Peer>> close();
  bool closed() const;
  void clear() noexcept;  // after close()

  // --- this pool's instance id ---
  std::uint32_t instance() const;  // the id that it has or proposes
  // Between these two, callers may see the proposed id. After the first end_listen() with `bound` the pool accepts it.
  void begin_listen();
  void end_listen(bool bound);
  // While one exists, a call to a peer is under way, which may be told the proposed id: it stays as it is.
  class Call {
   public:
    explicit Call(PeerTable& table) : table_(table), instance_(table.begin_call()) {}
    ~Call() { table_.end_call(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    std::uint32_t instance() const noexcept { return instance_; }  // this pool's id, as the peer is told

   private:
    PeerTable& table_;
    const std::uint32_t instance_;
  };
  // A peer has refused this id, because another has it. After kChanged a call tells another one; kLater: not while
  // other calls may tell the refused id; kNever: peers may have seen addresses with it.
  enum class Proposal : std::uint8_t { kChanged, kLater, kNever };
  Proposal propose_instead_of(std::uint32_t refused);
  // From now on an id that peers have seen is the pool's for good. Before that, the application does not see it.
  void keep_instance();

  // --- this pool's lease ---
  // Throws kClosed, and what Pool::set_instance() throws. A pool that has lost its lease before stays fenced.
  void join(std::uint32_t instance);
  // Both return at once, and have changed nothing when they throw std::bad_alloc; the caller ends the sessions of the
  // returned peers.
  std::vector<Peer> fence(const std::string& why);
  void unfence();
  void check_unfenced() const;  // throws kFenced
  // Records the refusal of a call, perhaps by a peer that has dropped this incarnation.
  void note_refusal(const Error& why);
  std::string dropped_by() const;

 private:
  void check_membership(const PeerMetadata& metadata, bool initiated_here) const;
  void check_instance(const PeerMetadata& metadata) const;
  bool has_departed(std::uint32_t instance) const;
  void check_replaces(const Peer& known, const PeerMetadata& metadata, bool initiated_here) const;
  void tell_joined(const PeerMetadata& metadata) noexcept;
  void tell_lost(const Session& session) noexcept;
  std::uint32_t instance_locked() const;
  std::uint32_t begin_call();
  void end_call() noexcept;
  void show_instance();

  Pool& pool_;
  PeerEvents& events_;
  const AddressBook& book_;
  const std::string name_;
  const std::uint64_t incarnation_;

  mutable std::mutex mutex_;  // guards the members below
  bool closed_ = false;
  bool joining_;                  // waits for its instance id
  bool lease_lost_ = false;       // between fence() and unfence()
  std::optional<Error> fenced_;   // thrown while fenced: it waits for its id, or has lost its lease
  std::string dropped_by_;        // the text of the peer's refusal
  InstanceId proposed_instance_;  // no other pool of this process proposes it
  bool keeps_instance_ = false;   // an id that peers have seen
  int listening_ = 0;
  int calling_ = 0;  // calls under way
  std::unordered_map<std::string, Peer> peers_;
  std::map<std::weak_ptr<Link>, std::uint64_t, std::owner_less<>> met_;  // incarnations
  std::unordered_set<std::uint32_t> instances_;                          // the ids of all peers that are or were here
};

}  // namespace kvpool
