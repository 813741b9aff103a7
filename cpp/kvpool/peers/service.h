// The half of a pool that speaks with its peers: the verbs, and the threads.
//
// One C++ thread (the reactor) answers peers and keeps leases; it never needs Python's GIL. Worker threads write what
// is large, for one peer after another; steps that take long for a peer, as making room, have threads that no content
// can fill.
//
//   PeerTable    who is there, and who may come in
//   Admission    how a peer is let in
//   PeerCaller   how this side calls peers
//   PeerParting  how peers go
//
// What is done when one of two peers has several ranks is behind instance_ranks.h.
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
#include "kvpool/exec/serial_executor.h"
#include "kvpool/exec/worker_pool.h"
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
#include "kvpool/transfer/recall_result.h"
#include "kvpool/transfer/request.h"
#include "kvpool/transfer/session_host.h"
#include "kvpool/transfer/tally.h"

namespace kvpool {

class Pool;

class Service final : private SessionHost {
 public:
  Service(Pool& pool, const ServiceOptions& options, const MakeRanks& make_ranks);
  ~Service() override { close(); }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // "unix:/path", "unix:@abstract", "tcp:HOST:PORT" (port 0: any). Returns the address to connect to.
  std::string listen(const std::string& address);
  // Returns the peer's name, also when it is a peer already, or calls at the same time. As long as nobody listens there
  // it tries again, unless told not to. Then the routes to it are measured, where that is a question. Throws kAuth,
  // kPeerLost (nobody listens), kProtocol, kLayoutMismatch, kDeadline, kCancelled.
  std::string connect(const std::string& address, const Waiting& waiting, bool wait_for_listener = true) {
    return caller_->connect(address, waiting, wait_for_listener);
  }
  void disconnect(const std::string& peer, const GivenUp& given_up = {}) { parting_.disconnect(peer, given_up); }
  std::vector<PeerInfo> peers() const { return table_.list(); }
  const ServiceOptions& options() const noexcept { return options_; }
  // What was asked for and cannot be had here in full, for a log: a route that leaves out a medium, say. Each says why.
  const std::vector<std::string>& notes() const noexcept { return routes_.notes(); }

  std::vector<Address> alloc(const std::string& peer, std::size_t n, MediumChoice medium, bool may_evict,
                             const Waiting& waiting);
  // The lent blocks among these, of any number of peers; others are left alone. When one of them is wrong, or
  // `free_own` throws, which frees the others, nothing has happened. From then on nobody keeps the others' from being
  // freed: what a peer answers is thrown when all have been asked. Blocks of a peer that could not be asked (kBusy)
  // stay lent.
  void free(const Address* addresses, std::size_t n, const Waiting& waiting,
            const std::function<void()>& free_own = {});

  // Asks a peer for these blocks back, which are lent to it, or for any `count` of them, and takes at the deadline what
  // has not come. Throws kPeerLost, kNotOwner, kArgument, kBusy, kCancelled: see Session::recall().
  RecallResult recall(const std::string& peer, std::vector<Address> addresses, const Waiting& waiting);
  RecallResult recall(const std::string& peer, std::size_t count, const Waiting& waiting);

  // In a cluster, a verb that names a member meets it first, if it is not connected: that takes at most until the
  // verb's deadline, or until `given_up`, and throws kPeerLost with what was tried. Every call tries again.
  std::shared_ptr<Transfer> transfer(TransferRequest&& request, const GivenUp& given_up = {});
  // A wrong argument throws, and none is started; what fails later, fails in its handle.
  std::vector<std::shared_ptr<Transfer>> transfer_batch(std::vector<TransferRequest>&& requests,
                                                        const GivenUp& given_up = {});
  // Reads blocks of a peer into active blocks of this pool: addresses() of the handle are `to`. When `to` is empty,
  // they are allocated as by alloc(), and freed again should the fetch fail. When `peer` is empty, it is whose blocks
  // the addresses are.
  std::shared_ptr<Transfer> fetch(FetchRequest&& request, const GivenUp& given_up = {});

  // The next item, or null at `until_ns`. Throws kClosed, and what the pool has failed with, once none is left.
  std::unique_ptr<Received> receive(std::int64_t until_ns);
  int received_fd() { return received_.descriptor(); }  // readable while items wait

  // Peers that come and go, and recalls: kept from begin to end, beginning with one event for each peer that is here.
  // The descriptor is readable while some wait. next_peer_event() never waits, and throws kClosed once the pool is
  // closed and none is left.
  int begin_peer_events() { return table_.begin_events(); }
  std::optional<PeerEvent> next_peer_event() { return events_.pop(); }
  void end_peer_events() noexcept { events_.end(); }

  // --- of a member of a cluster ---
  // Of a service that joins_cluster: its instance id, as the directory has given it. From now on peers are met.
  void join(std::uint32_t instance) { table_.join(instance); }
  // Who there is, without this pool: the whole picture, as often as it changes. Sessions with an incarnation that
  // another has followed under its name end with kPeerLost.
  void set_members(std::vector<ClusterMember> members);
  // As the verbs do it: returns when the member is connected.
  void meet_member(const std::string& peer, const Waiting& waiting) {
    static_cast<void>(caller_->reach(peer, waiting.until_ns, waiting.given_up));
  }
  // The directory has told that this incarnation is dead: its session ends with kPeerLost, and it is let in no more
  // until it is in the picture again. Idempotent.
  void expel(std::uint64_t incarnation, const std::string& why);
  // This pool has lost its own lease: its sessions end, what needs peers throws kFenced with this text, and nobody is
  // let in, until unfence(). Waits shortly for writes that are under way. Both idempotent.
  void fence(const std::string& why) { parting_.fence(why); }
  void unfence() { table_.unfence(); }
  // What a peer said that has dropped this incarnation, and refused it since; "" when none has. Forgotten by fence()
  // and unfence().
  std::string dropped_by() const { return table_.dropped_by(); }

  // --- of a logical instance; throw kState of another ---
  std::vector<RankInfo> ranks() const { return ranks_->list(); }
  // Until all ranks have joined; false at the deadline. Throws kPeerLost when one is lost.
  bool wait_for_ranks(std::int64_t deadline_ns) { return ranks_->wait_until_joined(deadline_ns); }
  // Of this incarnation: what a rank asks for when it joins.
  std::uint64_t incarnation() const noexcept { return incarnation_; }

  // The transfers that were begun here, as far as they have ended; also once it is closed.
  TransferTally::Counts transfer_counts(TransferKind kind) const noexcept { return tally_.counts(kind); }

  // The pool has failed: who waits for what peers send hears it.
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
    serial_executor_.run(key, priority, std::move(work));
  }
  void write(WriteJob&& job) override;
  void write_here(WriteJob&& job) override;
  void drained(Session& session) noexcept override { parting_.drained(session); }
  void write_lost() noexcept override { parting_.write_lost(); }
  void recalled(Session& session, const std::vector<Address>& addresses, std::int64_t deadline_ns) noexcept override;
  void tick_by(std::int64_t at_ns) override;

  std::shared_ptr<Session> borrower(const std::string& peer) const;  // service_recall.cpp
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
  WorkerPool workers_;    // large writes
  SerialExecutor steps_;  // what peers wait for, and writes never occupy
  SerialExecutor serial_executor_;
  SerialExecutor receiving_;
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
