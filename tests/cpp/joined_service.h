// Pools of this process that connect over real sockets.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "joined_pair.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/ranks/instance_ranks.h"

namespace kvpool::testing {

inline std::int64_t real_seconds(double seconds) { return monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9); }

inline std::string unix_address() {
  static std::atomic<int> number{0};
  return "unix:@kvpool-test-" + std::to_string(getpid()) + "-" + std::to_string(++number);
}

class ServiceNode final : public Node {
 public:
  explicit ServiceNode(const std::string& name, const std::vector<std::string>& routes = {}, std::uint32_t blocks = 16,
                       const std::function<void(ServiceOptions&)>& change = {})
      : ServiceNode(name, routes, {.hbm_blocks = blocks, .dram_blocks = blocks}, change) {}
  ServiceNode(const std::string& name, const std::vector<std::string>& routes, const PairOptions& options,
              const std::function<void(ServiceOptions&)>& change)
      : pool_(std::make_shared<Pool>(pool_options(options))),
        node_(pool_, make_ranks),
        service_(node_.start_service(service_options(name, routes, options, change))) {}

  // The verbs go to this peer.
  void meet(ServiceNode& peer, const std::string& address = unix_address()) {
    peer_ = connect(peer, address);
    peer.peer_ = service_.options().name;
  }
  std::string connect(ServiceNode& peer, const std::string& address = unix_address()) {
    return service_.connect(peer.service_.listen(address), real_seconds(60));
  }

  PeerNode& peer_node() noexcept { return node_; }
  Service& service() noexcept { return service_; }
  const std::string& name() const noexcept { return service_.options().name; }

  // --- Node ---
  const std::shared_ptr<Pool>& pool() override { return pool_; }
  std::shared_ptr<Transfer> transfer(TransferRequest&& request) override {
    request.peer = peer_;
    return service_.transfer(std::move(request));
  }
  std::shared_ptr<Transfer> fetch(FetchRequest&& request) override {
    request.peer = peer_;
    return service_.fetch(std::move(request));
  }
  std::shared_ptr<PeerMatch> match_at(MatchRequest&& request) override {
    request.peer = peer_;
    const auto match = std::make_shared<PeerMatch>(request, pool_->layout().block_tokens);
    service_.ask(match);
    return match;
  }
  std::shared_ptr<Transfer> fetch_prompt(PromptFetchRequest&& request) override {
    request.peer = peer_;
    return service_.fetch_prompt(std::move(request));
  }
  Addresses borrow(std::size_t n, MediumChoice medium) override {
    return service_.alloc(peer_, n, medium, /*may_evict=*/true, real_seconds(60));
  }
  void give_back(const Addresses& addresses) override {
    service_.free(addresses.data(), addresses.size(), real_seconds(60));
  }
  std::unique_ptr<Received> next_received() override { return service_.receive(0); }

 private:
  static PoolOptions pool_options(const PairOptions& options) {
    PoolOptions pool = small_options(options.hbm_blocks, options.dram_blocks);
    pool.layout.piece_bytes = options.piece_bytes;
    pool.layout.aggregated = options.aggregated;
    pool.audit = true;
    pool.device = options.device;
    pool.pin_dram = options.device >= 0;
    return pool;
  }
  static ServiceOptions service_options(const std::string& name, const std::vector<std::string>& routes,
                                        const PairOptions& options,
                                        const std::function<void(ServiceOptions&)>& change) {
    ServiceOptions service;
    service.name = name;
    service.secret = "s3cret";
    service.routes = routes;
    service.transfers_max = options.transfers_max;
    service.reserved_max = options.reserved_max;
    service.received_max = options.received_max;
    if (change) change(service);
    return service;
  }

  const std::shared_ptr<Pool> pool_;
  PeerNode node_;
  Service& service_;
  std::string peer_;
};

class ServicePair final : public JoinedPair {
 public:
  // `address`: at which b listens, and a stays connected.
  ServicePair(const std::string& route, const std::string& address, const PairOptions& options,
              const std::function<void(ServiceOptions&)>& change = {})
      : route_(route), a_("a", {route}, options, change), b_("b", {route}, options.of_b(), change) {
    a_.meet(b_, address);
  }
  ServiceNode& a() override { return a_; }
  ServiceNode& b() override { return b_; }
  const char* route() const override { return route_.c_str(); }
  std::int64_t now_ns() const override { return monotonic_ns(); }
  bool live(std::int64_t until_ns, const std::function<bool()>& holds) override {
    while (!holds()) {
      if (monotonic_ns() >= until_ns) return false;
      usleep(200);
    }
    return true;
  }

 private:
  const std::string route_;
  ServiceNode a_;
  ServiceNode b_;
};

}  // namespace kvpool::testing
