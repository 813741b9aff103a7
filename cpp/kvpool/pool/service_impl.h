// The service as its parts see it: service.cpp has the verbs and the threads, service_peers.cpp the peers' coming and
// going.
//
// Locks: mutex_ guards who is there. A session's calls are made without it, but for its counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvpool/pool/ghosts.h"
#include "kvpool/pool/local_services.h"
#include "kvpool/pool/peer_blocks.h"
#include "kvpool/pool/received_queue.h"
#include "kvpool/pool/route_maker.h"
#include "kvpool/pool/service.h"
#include "kvpool/pool/strands.h"
#include "kvpool/pool/workers.h"
#include "kvpool/transfer/session.h"
#include "kvpool/transport/endpoint.h"
#include "kvpool/transport/reactor.h"

namespace kvpool {

class Pool;

class ServiceImpl final : public Service, public LocalService, private SessionHost {
 public:
  ServiceImpl(Pool& pool, const ServiceOptions& options);
  ~ServiceImpl() override { close(); }

  std::string listen(const std::string& address) override;
  std::string connect(const std::string& address, std::int64_t deadline_ns) override;
  void disconnect(const std::string& peer) override;
  std::vector<PeerInfo> peers() override;
  const ServiceOptions& options() const noexcept override { return options_; }
  std::vector<Address> alloc(const std::string& peer, std::size_t n, Medium medium, bool may_evict,
                             std::int64_t deadline_ns) override {
    return find(peer)->borrow(n, medium, may_evict, deadline_ns);
  }
  void free(const Address* addresses, std::size_t n, std::int64_t deadline_ns) override;
  std::shared_ptr<Transfer> transfer(TransferRequest&& request) override {
    const auto session = find(request.peer);
    return session->transfer(std::move(request));
  }
  std::vector<std::shared_ptr<Transfer>> transfer_batch(std::vector<TransferRequest>&& requests) override;
  std::shared_ptr<Transfer> fetch(FetchRequest&& request) override;
  std::unique_ptr<Received> receive(std::int64_t until_ns) override;
  int received_fd() override { return received_.descriptor(); }
  void close() noexcept override;

 private:
  using SessionPointer = std::shared_ptr<Session>;
  struct Peer {
    SessionPointer session;
    std::shared_ptr<Link> link;
    std::uint64_t initiator = 0;  // epoch of the side that connected
  };

  // --- SessionHost ---
  BlockHost& blocks() noexcept override { return blocks_; }
  std::int64_t now_ns() const noexcept override { return monotonic_ns(); }
  const SessionLimits& limits() const noexcept override { return limits_; }
  void run(Priority priority, std::function<void()> work) override { workers_.run(priority, std::move(work)); }
  void write(WriteJob&& job) override;
  void drained(Session& session) noexcept override;
  void tick_by(std::int64_t at_ns) override;

  SessionPointer find(const std::string& peer);
  Introduction introduce();
  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerCard& card, bool initiated_here);
  void check_peer(const PeerCard& card) const;
  void check_instance(const PeerCard& card) const;
  void settle_instance();
  void on_session_lost(const SessionPointer& session, const std::shared_ptr<Link>& link);
  void on_peer_drained(std::uint64_t epoch) noexcept override;
  bool may_write_to(std::uint64_t epoch) noexcept override;
  void tick();
  void drop_received() noexcept;
  static void carry_out(WriteJob& job);
  static std::uint32_t random_instance();

  class LinkWatcher;

  Pool& pool_;
  ServiceOptions options_;
  const std::uint64_t epoch_;
  SessionLimits limits_;
  ReceivedQueue received_;
  PeerBlocks blocks_;
  RouteMaker routes_;
  Workers workers_;
  Strands strands_;
  std::unique_ptr<Reactor> reactor_;
  std::unique_ptr<Ghosts> ghosts_;
  std::unique_ptr<Endpoint> endpoint_;
  std::atomic<std::int64_t> next_tick_{std::numeric_limits<std::int64_t>::max()};

  mutable std::mutex mutex_;
  bool closed_ = false;
  std::uint32_t proposed_instance_;
  std::unordered_map<std::string, Peer> peers_;
  std::unordered_set<std::uint32_t>
      departed_;  // instance ids of peers that were here: what they lent is gone with them
};

}  // namespace kvpool
