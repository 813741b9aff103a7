// Routes that differ from the guesses between two simulated pools, for route_probe_test.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/strips.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/transfer/route_probe.h"
#include "sim_process.h"

namespace kvpool::testing {

// Writes at once, and takes as long as the test says.
class ModelRoute final : public Route {
 public:
  ModelRoute(SimClock& clock, const char* name, const MediaSpans& local, const MediaSpans& peer,
             const RoutePrior& guess, const RoutePrior& truth)
      : clock_(clock), name_(name), local_(local), peer_(peer), truth_(truth), cost_(guess) {}

  const char* name() const noexcept override { return name_; }
  RouteTraits traits() const noexcept override {
    return {.one_sided = true, .by_caller = true, .waits = false, .by_name = by_name};
  }
  bool is_ready(const MediaSet&, const MediaSet&) const noexcept override { return is_ready_now; }
  double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                     std::int64_t /*now_ns*/) const noexcept override {
    return cost_.estimate_us(from, to, size, clock_.now_ns());
  }
  RouteCost* cost() noexcept override { return &cost_; }
  WriteOutcome write(const WriteRequest& request) override {
    ++writes;
    if (on_write) on_write(writes);
    if (closed_) throw Error(ErrorCode::kPeerLost, "the route is closed");
    if (fails_with) throw Error(*fails_with, "broken");
    StripPlan plan(local_, peer_, request.strips, request.merge);
    WriteOutcome outcome;
    plan.emit(request.from, request.to, [&](std::span<const CopyPiece> pieces) {
      copy_pieces(pieces, CopyWay::kCached);
      outcome.pieces += pieces.size();
      for (const CopyPiece& piece : pieces) outcome.bytes += piece.bytes;
      return true;
    });
    const double us = truth_.us({outcome.pieces, outcome.bytes});
    clock_.run(clock_.now_ns() + static_cast<std::int64_t>(us * 1e3), [] { return false; });
    cost_.measured(media_set_of(request.from), media_set_of(request.to),
                   {outcome.pieces, outcome.bytes, request.gather}, us, clock_.now_ns());
    return outcome;
  }
  void close() noexcept override { closed_ = true; }

  bool by_name = true;
  bool is_ready_now = true;
  std::optional<ErrorCode> fails_with;
  std::function<void(int number)> on_write;
  int writes = 0;

 private:
  SimClock& clock_;
  const char* const name_;
  const MediaSpans& local_;
  const MediaSpans& peer_;
  const RoutePrior truth_;
  RouteCost cost_;
  bool closed_ = false;
};

inline constexpr RoutePrior kFast{5, 0.1, 1 / 20e3};
inline constexpr RoutePrior kSlow{200, 3, 1 / 500.0};

// Two processes; from a to b there are two routes, each of which is guessed to be the other.
class ProbeKit {
 public:
  static constexpr std::size_t kBlocks = 64;  // of each medium

  explicit ProbeKit(bool measures = true, std::size_t blocks_a = kBlocks, std::size_t blocks_b = kBlocks)
      : a_(clock_, bugs_, identity("a", 1, blocks_a)), b_(clock_, bugs_, identity("b", 2, blocks_b)) {
    SessionLimits limits;
    limits.measure_routes = measures;
    a_.set_limits(limits);
    b_.set_limits(limits);
    const auto links = SimLink::make(clock_, faults_, watch_, a_.actor(), b_.actor());
    link_a = links.first;
    link_b = links.second;
    const MediaSpans& here = a_.blocks().spans();
    const MediaSpans& there = b_.blocks().spans();
    fast = std::make_shared<ModelRoute>(clock_, "fast", here, there, kSlow, kFast);
    slow = std::make_shared<ModelRoute>(clock_, "slow", here, there, kFast, kSlow);
    a = join(a_, b_, link_a, {slow, fast});
    b = join(b_, a_, link_b, {std::make_shared<ModelRoute>(clock_, "back", there, here, kFast, kFast)});
    before_ = {stats_of(a_), stats_of(b_)};
  }
  ~ProbeKit() {
    clock_.clear();
    for (const auto& [session, link] : {std::pair(a, link_a), std::pair(b, link_b)}) {
      link->detach();
      if (!session->link_ended()) session->on_closed(Error(ErrorCode::kClosed, "the test ends"));
    }
  }
  ProbeKit(const ProbeKit&) = delete;
  ProbeKit& operator=(const ProbeKit&) = delete;

  // The time that a write of four blocks takes now.
  std::string chosen(Medium from = Medium::kHbm, Medium to = Medium::kHbm) const {
    const std::vector<std::shared_ptr<Route>> routes{slow, fast};
    return cheapest_route(routes, "", {4, 1024}, media_set_of(from), media_set_of(to), clock_.now_ns())->name();
  }
  void measure(std::int64_t timeout_ns = 1'000'000'000) { a->measure_routes(clock_.now_ns() + timeout_ns); }
  bool is_measured(Medium from = Medium::kHbm, Medium to = Medium::kHbm) const {
    const bool one = fast->cost()->measured_prior(from, to).has_value();
    CHECK(slow->cost()->measured_prior(from, to).has_value() == one);
    return one;
  }
  bool live(std::int64_t ns, const std::function<bool()>& holds) {
    clock_.run(clock_.now_ns() + ns, holds);
    return holds();
  }
  // Nothing visible has changed on either side, and no one has been told of anything.
  void check_nothing_left() {
    CHECK(stats_of(a_) == before_[0]);
    CHECK(stats_of(b_) == before_[1]);
    for (const auto& session : {a, b}) {
      const ReceiverCounts counts = session->counts();
      CHECK(counts.reserved + counts.quarantined + counts.transfers + counts.promised + counts.lent == 0);
      CHECK(session->under_way() == 0);
      CHECK(session->writes_under_way() == 0);
    }
    CHECK(b_.received().pop(0) == nullptr);
    for (SimProcess* const process : {&a_, &b_}) {
      for (const std::uint64_t ended : process->tally().counts(TransferKind::kSend).ended) CHECK(ended == 0);
    }
  }
  SimProcess& here() { return a_; }
  SimProcess& there() { return b_; }
  SimClock& clock() { return clock_; }

  std::shared_ptr<SimLink> link_a;
  std::shared_ptr<SimLink> link_b;
  std::shared_ptr<ModelRoute> fast;
  std::shared_ptr<ModelRoute> slow;
  std::shared_ptr<Session> a;
  std::shared_ptr<Session> b;

 private:
  static SimIdentity identity(const char* name, std::uint32_t instance, std::size_t blocks) {
    SimIdentity identity;
    identity.name = name;
    identity.instance = instance;
    identity.incarnation = 2 * instance + 1;
    identity.hbm_blocks = identity.dram_blocks = blocks;
    return identity;
  }
  // All that statistics tell of a pool.
  static std::vector<std::uint64_t> stats_of(SimProcess& process) {
    const PoolStats stats = process.pool().audit();
    const PoolCounters& counters = stats.counters;
    std::vector<std::uint64_t> all{counters.allocated_blocks, counters.freed_blocks,       counters.match_calls,
                                   counters.inserted_blocks,  counters.evicted_blocks,     stats.index_blocks,
                                   stats.index_nodes,         counters.swapped_out_blocks, stats.namespaces};
    for (const MediumCounts& medium : stats.media) {
      all.insert(all.end(), medium.by_state.begin(), medium.by_state.end());
    }
    return all;
  }
  std::shared_ptr<Session> join(SimProcess& self, SimProcess& other, const std::shared_ptr<SimLink>& link,
                                std::vector<std::shared_ptr<Route>> routes) {
    auto session = std::make_shared<Session>(self, other.metadata(), /*peer_writes_directly=*/true);
    session->start(link, std::move(routes));
    self.add_session(session);
    link->start(session);
    return session;
  }

  const SimBugs bugs_{};
  const SimFaults faults_{};
  const SimWatch watch_ = [](const std::byte*, std::size_t, SimClock::Actor) {};
  SimClock clock_{1};
  SimProcess a_;
  SimProcess b_;
  std::array<std::vector<std::uint64_t>, 2> before_;
};

}  // namespace kvpool::testing
