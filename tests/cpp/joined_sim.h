// Two simulated processes on a network that does nothing wrong (but for delays): the clock runs while a thread waits.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "joined_pair.h"
#include "sim_process.h"

namespace kvpool::testing {

class SimNode final : public Node {
 public:
  SimNode(SimClock& clock, const SimIdentity& identity, const PairOptions& options)
      : process_(clock, bugs_, identity, options.received_max) {
    SessionLimits limits;
    limits.transfers_max = options.transfers_max;
    limits.reserved_max = options.reserved_max;
    process_.set_limits(limits);
  }

  SimProcess& process() noexcept { return process_; }
  void meet(const SimProcess& peer, bool one_sided, std::shared_ptr<SimLink> link, std::shared_ptr<Route> route) {
    session_ = std::make_shared<Session>(process_, peer.metadata(), one_sided);
    link_ = std::move(link);
    session_->start(link_, {std::move(route)});
    process_.add_session(session_);
    link_->start(session_);
  }
  void part() {
    link_->detach();
    session_->on_closed(Error(ErrorCode::kClosed, "the test ends"));
  }

  // --- Node ---
  const std::shared_ptr<Pool>& pool() override { return process_.shared_pool(); }
  std::shared_ptr<Transfer> transfer(TransferRequest&& request) override {
    request.peer = session_->peer().name;
    return session_->transfer(std::move(request));
  }
  std::shared_ptr<Transfer> fetch(FetchRequest&& request) override {
    return session_->fetch(request, /*frees_on_failure=*/false);
  }
  std::shared_ptr<PeerMatch> match_at(MatchRequest&& request) override {
    request.peer = session_->peer().name;
    const auto match = std::make_shared<PeerMatch>(request, pool()->layout().block_tokens);
    match->ask(session_);
    return match;
  }
  std::shared_ptr<Transfer> fetch_prompt(PromptFetchRequest&& request) override {
    return session_->fetch_prompt(std::move(request));
  }
  Addresses borrow(std::size_t n, MediumChoice medium) override {
    return session_->borrow(n, medium, /*may_evict=*/true, process_.now_ns() + 5 * kSecond);
  }
  void give_back(const Addresses& addresses) override {
    session_->give_back(addresses, process_.now_ns() + 5 * kSecond);
  }
  std::unique_ptr<Received> next_received() override {
    auto item = process_.received().pop(0);
    if (item != nullptr) item->pins = Pins(pool(), std::exchange(item->pin, {}));
    return item;
  }

 private:
  const SimBugs bugs_{};
  SimProcess process_;
  std::shared_ptr<Session> session_;
  std::shared_ptr<SimLink> link_;
};

class SimPair final : public JoinedPair {
 public:
  SimPair(bool one_sided, const PairOptions& options)
      : route_(one_sided ? "sim" : "sim-sock"),
        clock_(/*seed=*/1),
        a_(clock_, identity("a", 1, options), options),
        b_(clock_, identity("b", 2, options.of_b()), options) {
    const auto links = SimLink::make(clock_, faults_, watch_, a_.process().actor(), b_.process().actor());
    const auto join = [&](SimNode& self, SimNode& other, const std::shared_ptr<SimLink>& link) {
      self.meet(other.process(), one_sided, link,
                std::make_shared<SimRoute>(clock_, faults_, watch_, self.process().actor(), one_sided,
                                           self.process().blocks().spans(), other.process().blocks().spans(), link));
    };
    join(a_, b_, links.first);
    join(b_, a_, links.second);
  }
  ~SimPair() override {
    clock_.clear();
    a_.part();
    b_.part();
  }
  SimPair(const SimPair&) = delete;
  SimPair& operator=(const SimPair&) = delete;

  SimNode& a() override { return a_; }
  SimNode& b() override { return b_; }
  const char* route() const override { return route_; }
  std::int64_t now_ns() const override { return clock_.now_ns(); }
  bool live(std::int64_t until_ns, const std::function<bool()>& holds) override {
    bool held = false;
    clock_.run(until_ns, [&] { return held = holds(); });
    return held || holds();
  }

 private:
  static SimIdentity identity(const char* name, std::uint32_t instance, const PairOptions& options) {
    SimIdentity identity;
    identity.name = name;
    identity.instance = instance;
    identity.incarnation = 2 * instance + 1;  // odd, as all are
    identity.hbm_blocks = options.hbm_blocks;
    identity.dram_blocks = options.dram_blocks;
    identity.aggregated = options.aggregated;
    return identity;
  }

  const char* const route_;
  SimClock clock_;
  const SimFaults faults_{};
  const SimWatch watch_ = [](const std::byte*, std::size_t, SimClock::Actor) {};
  SimNode a_;
  SimNode b_;
};

}  // namespace kvpool::testing
