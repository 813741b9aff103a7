// The service as its parts see it: service.cpp has the verbs and the threads, service_visit.cpp how this side calls a
// peer, service_peers.cpp who is admitted, service_parting.cpp how peers go, service_report.cpp what is told of them,
// service_close.cpp the end, service_members.cpp what a cluster's directory has to say. What is done when one of two
// peers has several ranks is behind instance_ranks.h.
//
// Locks: mutex_ guards who is there. A session's calls are made without it, but for its counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/exec/serial_executor.h"
#include "kvpool/exec/worker_pool.h"
#include "kvpool/net/connect/endpoint.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/instance_id.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/peers/local_services.h"
#include "kvpool/peers/peer_blocks.h"
#include "kvpool/peers/received_queue.h"
#include "kvpool/peers/retained_memory.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/peers/service.h"
#include "kvpool/peers/single_flight.h"
#include "kvpool/peers/writer_quarantine.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

class Pool;

class ServiceImpl final : public Service, public LocalService, private SessionHost {
 public:
  ServiceImpl(Pool& pool, const ServiceOptions& options, const MakeRanks& make_ranks);
  ~ServiceImpl() override { close(); }

  std::string listen(const std::string& address) override;
  std::string connect(const std::string& address, const Waiting& waiting, bool wait_for_listener) override;
  void disconnect(const std::string& peer, const GivenUp& given_up) override;
  std::vector<PeerInfo> peers() override;
  const ServiceOptions& options() const noexcept override { return options_; }
  const std::vector<std::string>& notes() const noexcept override { return routes_.notes(); }
  std::vector<Address> alloc(const std::string& peer, std::size_t n, MediumChoice medium, bool may_evict,
                             const Waiting& waiting) override {
    return reach(peer, waiting.until_ns, waiting.given_up)->borrow(n, medium, may_evict, waiting);
  }
  void free(const Address* addresses, std::size_t n, const Waiting& waiting,
            const std::function<void()>& free_own) override;
  RecallResult recall(const std::string& peer, std::vector<Address> addresses, const Waiting& waiting) override;
  RecallResult recall(const std::string& peer, std::size_t count, const Waiting& waiting) override;
  std::shared_ptr<Transfer> transfer(TransferRequest&& request, const GivenUp& given_up) override {
    const auto session = reach(request.peer, request.deadline_ns, given_up);
    return session->transfer(std::move(request));
  }
  std::vector<std::shared_ptr<Transfer>> transfer_batch(std::vector<TransferRequest>&& requests,
                                                        const GivenUp& given_up) override;
  std::shared_ptr<Transfer> fetch(FetchRequest&& request, const GivenUp& given_up) override;
  std::unique_ptr<Received> receive(std::int64_t until_ns) override;
  int received_fd() override { return received_.descriptor(); }
  int begin_peer_events() override;
  std::optional<PeerEvent> next_peer_event() override { return events_.pop(); }
  void end_peer_events() noexcept override { events_.end(); }
  void join(std::uint32_t instance) override;
  void set_members(std::vector<ClusterMember> members) override;
  void meet_member(const std::string& peer, const Waiting& waiting) override {
    static_cast<void>(reach(peer, waiting.until_ns, waiting.given_up));
  }
  void expel(std::uint64_t epoch, const std::string& why) override;
  void fence(const std::string& why) override;
  void unfence() override;
  std::string dropped_by() const override;
  std::vector<RankInfo> ranks() override { return ranks_->list(); }
  bool wait_for_ranks(std::int64_t deadline_ns) override { return ranks_->wait_until_joined(deadline_ns); }
  std::uint64_t epoch() const noexcept override { return epoch_; }
  TransferTally::Counts transfer_counts(TransferKind kind) const noexcept override { return tally_.counts(kind); }
  void fail(const Error& why) override { received_.fail(why); }
  void close() noexcept override;

 private:
  using SessionPointer = std::shared_ptr<Session>;
  struct Peer {
    SessionPointer session;
    std::shared_ptr<Link> link;
    std::uint64_t initiator = 0;             // epoch of the side that connected
    std::shared_ptr<GroupConnection> group;  // when blocks go between ranks, not over this link
  };

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
  void recalled(Session& session, const std::vector<Address>& addresses, std::int64_t deadline_ns) noexcept override;
  void drained(Session& session) noexcept override;
  void write_lost() noexcept override { write_lost_.store(true); }
  void tick_by(std::int64_t at_ns) override;

  void watch_device(WriteJob& job);
  std::string visit(const std::string& address, const Waiting& waiting, bool wait_for_listener);
  std::string meet(const std::string& address, const Waiting& waiting);
  void measure_routes(const std::string& peer, const Waiting& waiting);
  std::string name_of(std::uint64_t epoch, bool settled = false) const;
  Introduction introduce();
  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata,
                                     bool initiated_here);
  void check_name(const PeerMetadata& metadata) const;
  void check_instance(const PeerMetadata& metadata) const;
  void end_half_open(const PeerMetadata& metadata);
  void check_rival(const Peer& known, const PeerMetadata& metadata, bool initiated_here) const;
  void tell_joined(const PeerMetadata& metadata);
  void tell_lost(const Session& session);
  void on_session_lost(const SessionPointer& session, const std::shared_ptr<Link>& link,
                       const std::shared_ptr<GroupConnection>& group);

  // --- service_members.cpp ---
  // Null when there is none of this name. Throws kFenced, kClosed.
  SessionPointer find(const std::string& peer) const;
  // The same, and a member that is not connected is met first. Throws kPeerLost, too, and kCancelled.
  SessionPointer reach(const std::string& peer, std::int64_t until_ns, const GivenUp& given_up);
  void call_on(const ClusterMember& member, const Waiting& waiting);
  [[noreturn]] void throw_unknown(const std::string& peer) const;
  SessionPointer borrower(const std::string& peer) const;  // service_recall.cpp
  std::string owner_of(const std::vector<Address>& addresses) const;
  void check_unfenced() const;
  void part_from(std::uint64_t epoch, const Error& why);
  void check_membership(const PeerMetadata& metadata, bool initiated_here) const;
  void note_refusal(const Error& why);

  void meet_ranks(const std::shared_ptr<Link>& link, const std::string& address, const Waiting& waiting);
  void on_rank_lost(const Error& why);
  bool is_met_again(const Session& session) const noexcept;
  void on_peer_drained(std::uint64_t epoch) noexcept override;
  bool may_write_to(std::uint64_t epoch) noexcept override;
  void tick();
  struct LentGroup {  // of one peer, among the addresses of a call
    SessionPointer session;
    std::vector<Address> addresses;
    std::vector<std::size_t> positions;
  };
  std::vector<LentGroup> group_lent(const Address* addresses, std::size_t n);
  struct Left {
    std::shared_ptr<DepartingPeer> party;
    std::shared_ptr<Link> link;
  };
  void let_go_of_memory(std::vector<Left> left) noexcept;
  void drop_received() noexcept;
  static std::uint64_t random_epoch();

  class LinkWatcher;

  Pool& pool_;
  ServiceOptions options_;
  const std::uint64_t epoch_;
  SessionLimits limits_;
  TransferTally tally_;
  ReceivedQueue received_;
  PeerEvents events_;
  PeerBlocks blocks_;
  RouteMaker routes_;
  WorkerPool workers_;    // large writes
  SerialExecutor steps_;  // what peers wait for, and no write keeps waiting
  SerialExecutor serial_executor_;
  SerialExecutor receiving_;
  std::unique_ptr<Reactor> reactor_;
  std::unique_ptr<WriterQuarantine> writer_quarantine_;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<InstanceRanks> ranks_;
  AddressBook book_;
  SingleFlight attempts_;
  std::atomic<int> connecting_{0};  // callers of connect()
  std::atomic<bool> write_lost_{false};
  std::atomic<std::int64_t> next_tick_{std::numeric_limits<std::int64_t>::max()};

  mutable std::mutex mutex_;
  bool closed_ = false;
  bool joining_;                  // the instance id is still to come
  std::optional<Error> fenced_;   // what is thrown meanwhile
  std::string dropped_by_;        // what the peer said
  InstanceId proposed_instance_;  // which no pool of this process proposes, as long as this one is there
  int listening_ = 0;             // calls of listen() under way: callers may hear the proposed id before they return
  std::unordered_map<std::string, Peer> peers_;
  std::map<std::weak_ptr<Link>, std::uint64_t, std::owner_less<>> met_;  // epochs of peers that connect() has met
  std::unordered_set<std::uint32_t>
      departed_;  // instance ids of peers that were here: what they lent is gone with them
};

}  // namespace kvpool
