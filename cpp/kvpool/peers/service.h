// A pool's service: the verbs between peers, and their threads.
//
// One C++ thread (the reactor) answers peers and keeps leases; it never needs Python's GIL. All longer work runs
// on the pool's executor, as five classes of tasks, each with threads that the others never occupy.
//
//   PeerTable    the connected peers, and the rules that admit them
//   Admission    admits peers
//   PeerCaller   connects to peers
//   PeerParting  the departure of peers
//
// instance_ranks.h hides what is different when one of two peers has several ranks.
//
// Thread-safety: everything here may be called by several threads; everything that waits has a deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/clock.h"
#include "kvpool/base/wait.h"
#include "kvpool/exec/executor.h"
#include "kvpool/exec/serial_executor.h"
#include "kvpool/net/connect/endpoint.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/address_book.h"
#include "kvpool/peers/admission.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/peers/peer_blocks.h"
#include "kvpool/peers/peer_caller.h"
#include "kvpool/peers/peer_events.h"
#include "kvpool/peers/peer_info.h"
#include "kvpool/peers/peer_parting.h"
#include "kvpool/peers/peer_table.h"
#include "kvpool/peers/received.h"
#include "kvpool/peers/received_queue.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/peers/service_options.h"
#include "kvpool/peers/writer_quarantine.h"
#include "kvpool/transfer/handle.h"
#include "kvpool/transfer/peer_match.h"
#include "kvpool/transfer/recall_result.h"
#include "kvpool/transfer/request.h"
#include "kvpool/transfer/session_host.h"
#include "kvpool/transfer/tally.h"
#include "kvpool/views/lent_attends.h"

namespace kvpool {

class Attender;
class Pool;

class Service final : private SessionHost {
 public:
  // All of it outlives the service. `attender`: computes attention for peers.
  Service(Pool& pool, Attender& attender, const ServiceOptions& options, const MakeRanks& make_ranks);
  ~Service() override { close(); }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // "unix:/path", "unix:@abstract", "tcp:HOST:PORT" (port 0: any). Returns the address to connect to.
  std::string listen(const std::string& address);
  // Returns the peer's name, also when it is connected already or connects at the same time. With wait_for_listener it
  // retries while nothing listens there. Then it measures the routes to the peer, if there is a choice. Throws kAuth,
  // kPeerLost (nothing listens), kProtocol, kLayoutMismatch, kDeadline, kCancelled.
  std::string connect(const std::string& address, const Waiting& waiting, bool wait_for_listener = true) {
    return caller_->connect(address, waiting, wait_for_listener);
  }
  // Before this, addresses that the application gets carry no instance id, even if peers know the id.
  void keep_instance() { table_.keep_instance(); }
  void disconnect(const std::string& peer, const GivenUp& given_up = {}) { parting_.disconnect(peer, given_up); }
  std::vector<PeerInfo> peers() const { return table_.list(); }
  const ServiceOptions& options() const noexcept { return options_; }
  // Requested features that are only partly available, for a log: a route that leaves out a medium, say. Each says why.
  const std::vector<std::string>& notes() const noexcept { return routes_.notes(); }

  std::vector<Address> alloc(const std::string& peer, std::size_t n, MediumChoice medium, bool may_evict,
                             const Waiting& waiting);
  // Gives back the lent blocks among these, of any number of peers; `free_own` frees the others. If an address is wrong
  // or `free_own` throws, nothing has happened. After that, the error of one peer does not keep the blocks of others
  // from being given back: it is thrown when all peers have been asked. Blocks of a peer that could not be asked
  // (kBusy) stay lent.
  void free(const Address* addresses, std::size_t n, const Waiting& waiting,
            const std::function<void()>& free_own = {});

  // Lends blocks that an engine allocates to a peer: see Session::lend(). A member of the cluster is connected first.
  void lend(const std::string& peer, std::vector<Address> addresses, const Waiting& waiting);
  // Asks a peer to give back these blocks, or any `count` blocks, that are lent to it, and at the deadline takes those
  // that it has not given back. Throws kPeerLost, kNotOwner, kArgument, kBusy, kCancelled: see Session::recall().
  RecallResult recall(const std::string& peer, std::vector<Address> addresses, const Waiting& waiting);
  RecallResult recall(const std::string& peer, std::size_t count, const Waiting& waiting);

  // In a cluster, a verb that names a member first connects to it, if necessary: at most until the verb's deadline or
  // `given_up`. Throws kPeerLost with the addresses that it tried. Every call tries again.
  std::shared_ptr<Transfer> transfer(TransferRequest&& request, const GivenUp& given_up = {});
  // Starts none and throws if an argument is wrong; handles report later errors.
  std::vector<std::shared_ptr<Transfer>> transfer_batch(std::vector<TransferRequest>&& requests,
                                                        const GivenUp& given_up = {});
  // Reads blocks of a peer into active blocks of this pool: addresses() of the handle are `to`. If `to` is empty,
  // blocks are allocated as by alloc(), and freed if the fetch fails. If `peer` is empty, it is the owner of the
  // addresses.  service_fetch.cpp
  std::shared_ptr<Transfer> fetch(FetchRequest&& request, const GivenUp& given_up = {});
  // Brings what a peer has cached of a prompt, and this pool has not, into the index: addresses() of the handle are
  // where the whole of it lies then. All of it, or nothing.
  std::shared_ptr<Transfer> fetch_prompt(PromptFetchRequest&& request, const GivenUp& given_up = {});
  // Asks the peer of a match, which has not been asked. Never waits: if the peer is a member of the cluster that is not
  // connected yet, another thread connects. What goes wrong is the match's error, as is kPeerLost. Throws kClosed,
  // kFenced; then nobody was asked.
  void ask(const std::shared_ptr<PeerMatch>& match);  // service_match.cpp

  // The session with the one peer that owns all these blocks. Connects to a member of the cluster first, if necessary.
  // Throws kArgument unless they have one owner, kPeerLost, kFenced, kClosed, kCancelled.
  std::shared_ptr<Session> reach_owner(const std::vector<Address>& addresses, const Waiting& waiting) {
    return caller_->reach(caller_->owner_of(addresses), waiting.until_ns, waiting.given_up);
  }

  // The next item, or null at `until_ns`. Once none is left, throws kClosed or the error with which the pool has
  // failed.
  std::unique_ptr<Received> receive(std::int64_t until_ns);
  int received_fd() { return received_.descriptor(); }  // readable while items wait

  // Events of peers that join and are lost, and recalls: kept from begin to end, first one for each connected peer. The
  // descriptor is readable while events wait. next_peer_event() never waits, and throws kClosed once the pool is closed
  // and none is left.
  int begin_peer_events() { return table_.begin_events(); }
  std::optional<PeerEvent> next_peer_event() { return events_.pop(); }
  void end_peer_events() noexcept { events_.end(); }

  // --- for a member of a cluster --- For a service with joins_cluster: sets the instance id that the directory has
  // assigned. From now on it has peers.
  void join(std::uint32_t instance) { table_.join(instance); }
  // Sets the complete list of members without this pool, whenever it changes. Sessions with an incarnation that a new
  // one has replaced under the same name end with kPeerLost.
  void set_members(std::vector<ClusterMember> members);
  // Connects to a member as the verbs do.
  void meet_member(const std::string& peer, const Waiting& waiting) {
    static_cast<void>(caller_->reach(peer, waiting.until_ns, waiting.given_up));
  }
  // The directory has declared this incarnation dead: its session ends with kPeerLost, and it is refused until a list
  // of members contains it again. Idempotent.
  void expel(std::uint64_t incarnation, const std::string& why);
  // This pool has lost its lease: until unfence(), it has no sessions, calls that need peers throw kFenced with this
  // text, and no peer is admitted. Waits shortly for writes in progress. Both idempotent.
  void fence(const std::string& why) { parting_.fence(why); }
  void unfence() { table_.unfence(); }
  // The refusal of a peer that has dropped this incarnation; "" if no peer has. fence() and unfence() reset it.
  std::string dropped_by() const { return table_.dropped_by(); }
  // The names of lost peers for which blocks here are quarantined. To meet one again is a proof that it writes no more.
  std::vector<std::string> awaited_writers() const { return writer_quarantine_.awaited(); }

  // --- for a logical instance; throw kState otherwise ---
  std::vector<RankInfo> ranks() const { return ranks_->list(); }
  // Waits until all ranks have joined; false at the deadline. Throws kPeerLost when a rank is lost.
  bool wait_for_ranks(std::int64_t deadline_ns) { return ranks_->wait_until_joined(deadline_ns); }
  // The number that a rank must know to join.
  std::uint64_t incarnation() const noexcept { return incarnation_; }

  // Counts the transfers that were begun here and have ended; also after close().
  TransferTally::Counts transfer_counts(TransferKind kind) const noexcept { return tally_.counts(kind); }

  // The pool has failed: ends receive() with this error.
  void fail(const Error& why) { received_.fail(why); }
  // Ends everything: transfers fail with kClosed, peers are told, threads joined. Idempotent.
  void close() noexcept;

 private:
  // --- SessionHost ---
  BlockHost& blocks() noexcept override { return blocks_; }
  std::int64_t now_ns() const noexcept override { return monotonic_ns(); }
  const SessionLimits& limits() const noexcept override { return limits_; }
  TransferTally& tally() noexcept override { return tally_; }
  void run(const void* key, std::function<void()> work) override {
    steps_.run(key, Priority::kDecode, std::move(work));
  }
  void run_waiting(const void* key, Priority priority, std::function<void()> work) override {
    waits_.run(key, priority, std::move(work));
  }
  void write(WriteJob&& job) override;
  void write_here(WriteJob&& job) override;
  void drained(Session& session) noexcept override { parting_.drained(session); }
  void write_lost() noexcept override { parting_.write_lost(); }
  void recalled(Session& session, const std::vector<Address>& addresses, std::int64_t deadline_ns) noexcept override;
  std::shared_ptr<PeerReads> make_reads(const PeerMetadata& peer, bool by_mapping) override;
  void tick_by(std::int64_t at_ns) override;

  std::shared_ptr<Session> borrower(const std::string& peer) const;                        // service_recall.cpp
  std::unique_ptr<Route> reader_for(const Session& session, const FetchRequest& request);  // service_fetch.cpp
  void watch_device(WriteJob& job);
  void tick();
  struct LentGroup {  // of one peer, among the addresses of a call
    std::shared_ptr<Session> session;
    std::vector<Address> addresses;
    std::vector<std::size_t> positions;
  };
  std::vector<LentGroup> group_lent(const Address* addresses, std::size_t n) const;
  void end_sessions(const std::vector<PeerTable::Peer>& peers) noexcept;
  struct Left {
    std::shared_ptr<DepartingPeer> party;
    std::shared_ptr<Link> link;
  };
  void let_go_of_memory(std::vector<Left> left) noexcept;
  void drop_received() noexcept;

  Pool& pool_;
  const std::uint64_t incarnation_;
  const ServiceOptions options_;
  const SessionLimits limits_;
  TransferTally tally_;
  ReceivedQueue received_;
  PeerEvents events_;
  PeerBlocks blocks_;
  RouteMaker routes_;
  TaskClass writes_;         // large writes, taking peers in turn
  SerialExecutor steps_;     // steps that peers wait for, such as making room
  SerialExecutor waits_;     // work that waits for a peer: writes of some routes, and measuring routes
  SerialExecutor watches_;   // proofs and deadlines that none of the above may keep waiting
  SerialExecutor receives_;  // receiving halves of routes, which wait for the sending ones
  LentAttends lent_attends_;
  const std::unique_ptr<Reactor> reactor_;
  WriterQuarantine writer_quarantine_;
  AddressBook book_;
  PeerTable table_;
  PeerParting parting_;
  Admission admission_;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<InstanceRanks> ranks_;
  std::unique_ptr<PeerCaller> caller_;
  std::atomic<std::int64_t> next_tick_{std::numeric_limits<std::int64_t>::max()};
};

}  // namespace kvpool
