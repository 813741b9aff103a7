// Routes that differ from the guesses, measured on a simulated clock; and what is left of a probe, wherever
// it ends.
#include "kvpool/transfer/route_probe.h"

#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/strips.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/transfer/outgoing.h"
#include "sim_process.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kSecond = 1000 * kMs;
constexpr std::size_t kBlocks = 64;  // of each medium

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
  double estimate_us(const MediaSet& from, const MediaSet& to, std::uint64_t pieces, std::uint64_t bytes,
                     std::int64_t /*now_ns*/) const noexcept override {
    return cost_.estimate_us(from, to, pieces, bytes, clock_.now_ns());
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
    const double us = truth_.us(outcome.pieces, outcome.bytes);
    clock_.run(clock_.now_ns() + static_cast<std::int64_t>(us * 1e3), [] { return false; });
    cost_.measured(media_set_of(request.from), media_set_of(request.to), outcome.pieces, outcome.bytes, us,
                   clock_.now_ns());
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

constexpr RoutePrior kFast{5, 0.1, 1 / 20e3};
constexpr RoutePrior kSlow{200, 3, 1 / 500.0};

// Two processes; from a to b there are two routes, each of which is guessed to be the other.
class ProbeKit {
 public:
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
    return cheapest_route(routes, "", 4, 1024, media_set_of(from), media_set_of(to), clock_.now_ns())->name();
  }
  void measure(std::int64_t timeout_ns = kSecond) { a->measure_routes(clock_.now_ns() + timeout_ns); }
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

TEST_CASE("measurements correct a wrong guess, and for longer than writes alone do") {
  ProbeKit kit;
  CHECK(kit.chosen() == "slow");
  kit.measure();
  kit.check_nothing_left();
  for (const Medium from : {Medium::kHbm, Medium::kDram}) {
    for (const Medium to : {Medium::kHbm, Medium::kDram}) {
      REQUIRE(kit.is_measured(from, to));
      CHECK(kit.chosen(from, to) == "fast");
      const auto found = kit.slow->cost()->measured_prior(from, to);
      CHECK(found->latency_us == doctest::Approx(kSlow.latency_us).epsilon(0.01));
      CHECK(found->us_per_piece == doctest::Approx(kSlow.us_per_piece).epsilon(0.05));
    }
  }
  kit.live(600 * kSecond, [] { return false; });
  CHECK(kit.chosen() == "fast");
  const int writes = kit.fast->writes;
  kit.measure();  // once is enough
  CHECK(kit.fast->writes == writes);
}

TEST_CASE("a rate that short blocks cannot show is not inferred from them") {
  ProbeKit kit;
  kit.measure();
  const auto fast = kit.fast->cost()->measured_prior(Medium::kHbm, Medium::kHbm);
  REQUIRE(fast);
  CHECK(fast->latency_us == doctest::Approx(kFast.latency_us).epsilon(0.1));
  CHECK(fast->us_per_byte >= kSlow.us_per_byte);  // its guess
  CHECK(fast->us_per_piece >= kSlow.us_per_piece);
}

TEST_CASE("nothing is measured between ranks, without the setting, or without a choice of routes") {
  ProbeKit off(/*measures=*/false);
  off.measure();
  CHECK(off.fast->writes == 0);
  ProbeKit plain;  // memory of hosts, by routes that go without saying
  plain.fast->by_name = plain.slow->by_name = false;
  plain.measure();
  CHECK(plain.fast->writes == 0);
  ProbeKit single;  // b has one route
  single.b->measure_routes(single.clock().now_ns() + kSecond);
  CHECK(single.link_b->ended() == false);
  single.check_nothing_left();
}

TEST_CASE("the server side measures after its first write, and only the media of that write") {
  ProbeKit kit;
  const Addresses from = alloc(kit.here().pool(), 2);
  TransferRequest request;
  request.peer = "b";
  request.from = from;
  request.deadline_ns = kit.clock().now_ns() + kSecond;
  static_cast<void>(kit.a->prepare(std::move(request)));
  CHECK_FALSE(kit.live(kSecond, [&] { return kit.slow->writes + kit.fast->writes > 0; }));
  // The write that it was chosen for; its blocks need not be promised by anybody.
  const Addresses to = alloc(kit.there().pool(), 2);
  const BlockStrip strip{0, 0, 64};
  WriteJob job;
  job.route = kit.slow;
  job.bytes = 2 * strip.bytes;
  job.request.strips = {&strip, 1};
  job.request.from = from;
  job.request.to = to;
  job.request.deadline_ns = kit.clock().now_ns() + kSecond;
  job.done = [&](const WriteOutcome&, const Error*) { CHECK(kit.slow->writes + kit.fast->writes == 1); };
  kit.a->write_here(std::move(job));
  kit.there().pool().free(to.data(), to.size());
  CHECK(kit.live(kSecond, [&] { return kit.is_measured(); }));
  CHECK(kit.chosen() == "fast");
  CHECK_FALSE(kit.is_measured(Medium::kDram));
  CHECK(kit.live(kSecond, [&] { return kit.a->under_way() == 0; }));
  kit.here().pool().free(from.data(), from.size());
}

TEST_CASE("a route that is not ready yet is skipped, and asked again when it is written to") {
  ProbeKit kit;
  kit.fast->is_ready_now = false;
  kit.measure();
  CHECK(kit.slow->writes == 0);
  kit.fast->is_ready_now = true;
  kit.measure();
  CHECK(kit.is_measured());
  kit.check_nothing_left();
}

TEST_CASE("nothing is measured without free blocks on both sides, and a few are enough") {
  for (const bool here : {true, false}) {
    for (const std::size_t left : {0, 1, 3}) {
      CAPTURE(here);
      CAPTURE(left);
      ProbeKit kit;
      Pool& pool = (here ? kit.here() : kit.there()).pool();
      const Addresses taken = alloc(pool, kBlocks - left);
      kit.measure();
      CHECK(kit.is_measured() == (left > 0));
      CHECK(kit.is_measured(Medium::kDram, Medium::kDram));
      pool.free(taken.data(), taken.size());
      const PoolStats stats = pool.audit();
      CHECK(stats.media[Medium::kHbm].by_state[static_cast<std::size_t>(BlockState::kFree)] == kBlocks);
    }
  }
}

TEST_CASE("a probe takes at most one block of eight on either side") {
  for (const auto& [a, b, most] : {std::tuple(kBlocks, kBlocks, 8), std::tuple(kBlocks, std::size_t{31}, 3),
                                   std::tuple(std::size_t{15}, kBlocks, 1), std::tuple(std::size_t{7}, kBlocks, 0)}) {
    CAPTURE(a);
    CAPTURE(b);
    ProbeKit kit(/*measures=*/true, a, b);
    std::size_t seen = 0;
    kit.fast->on_write = [&](int) {
      for (SimProcess* const process : {&kit.here(), &kit.there()}) {
        for (const MediumCounts& medium : process->pool().stats().media) {
          const std::size_t taken = medium.capacity - medium.by_state[static_cast<std::size_t>(BlockState::kFree)];
          seen = std::max(seen, taken);
        }
      }
    };
    kit.measure();
    CHECK(seen == static_cast<std::size_t>(most));
    CHECK(kit.is_measured() == (most > 0));
    kit.check_nothing_left();
  }
}

TEST_CASE("the time of one block says nothing of the cost of several") {
  ProbeKit kit(/*measures=*/true, 8, 8);
  kit.measure();
  REQUIRE(kit.is_measured());
  CHECK(kit.fast->cost()->measured_prior(Medium::kHbm, Medium::kHbm)->us_per_piece >= kSlow.us_per_piece);  // its guess
  CHECK(kit.slow->cost()->measured_prior(Medium::kHbm, Medium::kHbm)->us_per_piece >= kFast.us_per_piece);
}

TEST_CASE("no cached block is evicted for a probe") {
  ProbeKit kit;
  for (SimProcess* const process : {&kit.here(), &kit.there()}) {
    const Held held = insert(process->shared_pool(), prompt(1, kBlocks), alloc(process->pool(), kBlocks));
    CHECK(held.outcome.inserted == kBlocks);
  }
  kit.measure();
  CHECK_FALSE(kit.is_measured());
  for (SimProcess* const process : {&kit.here(), &kit.there()}) {
    CHECK(match(process->shared_pool(), prompt(1, kBlocks)).addresses.size() == kBlocks);
  }
}

TEST_CASE("a probe that runs out of time leaves the guesses, and gives its blocks back") {
  for (std::int64_t timeout_ns = -kMs; timeout_ns < 12 * kMs; timeout_ns += kMs / 3) {
    CAPTURE(timeout_ns);
    ProbeKit kit;
    const std::int64_t began = kit.clock().now_ns();
    kit.measure(timeout_ns);
    CHECK(kit.clock().now_ns() < began + std::max<std::int64_t>(timeout_ns, 0) + 20 * kMs);
    static_cast<void>(kit.is_measured());  // all or none
    REQUIRE(kit.live(10 * kSecond, [&] { return kit.b->counts().promised == 0; }));
    kit.check_nothing_left();
  }
}

TEST_CASE("a caller that cancels a probe gets kCancelled, and nothing is left") {
  for (int asked_max = 0; asked_max < 30; asked_max += 3) {
    CAPTURE(asked_max);
    ProbeKit kit;
    int asked = 0;
    const Waiting waiting(kit.clock().now_ns() + kSecond, [&] { return ++asked > asked_max; });
    CHECK(code_of([&] { kit.a->measure_routes(waiting); }) == ErrorCode::kCancelled);
    REQUIRE(kit.live(10 * kSecond, [&] { return kit.b->counts().promised == 0; }));
    kit.check_nothing_left();
  }
}

TEST_CASE("a route that fails in a probe is reported, and the others are measured without it") {
  ProbeKit kit;
  kit.slow->fails_with = ErrorCode::kRouteFailed;
  kit.measure();
  CHECK(kit.fast->cost()->measured_prior(Medium::kHbm, Medium::kHbm));
  CHECK_FALSE(kit.slow->cost()->measured_prior(Medium::kHbm, Medium::kHbm));
  CHECK(kit.slow->health().report());
  CHECK_FALSE(kit.fast->health().report());
  kit.check_nothing_left();
}

TEST_CASE("if the link ends in a probe, this side keeps nothing, and the peer nothing once the writer is gone") {
  int ended = 0;
  for (int at = 1; at < 26; ++at) {
    for (const bool by_peer : {false, true}) {
      CAPTURE(at);
      CAPTURE(by_peer);
      ProbeKit kit;
      kit.fast->on_write = [&](int number) {
        if (number == at) (by_peer ? kit.link_b : kit.link_a)->close(Error(ErrorCode::kPeerLost, "it died"));
      };
      kit.measure();
      if (kit.fast->writes >= at) ++ended;
      kit.link_a->close(Error(ErrorCode::kPeerLost, "it is over"));
      REQUIRE(kit.live(10 * kSecond, [&] { return kit.a->link_ended() && kit.b->link_ended(); }));
      for (const auto& session : {kit.a, kit.b}) session->on_writer_gone();
      kit.check_nothing_left();
    }
  }
  CHECK(ended > 20);
}

TEST_CASE("if the pool closes in a probe, the probe ends at once and nothing is left") {
  for (int at = 1; at < 26; ++at) {
    CAPTURE(at);
    ProbeKit kit;
    kit.slow->on_write = [&](int number) {
      if (number == at) kit.a->stop_writing(Error(ErrorCode::kClosed, "the pool is closed"));
    };
    kit.measure();
    if (kit.slow->writes < at) break;
    CHECK(kit.slow->writes == at);
    CHECK_FALSE(kit.is_measured(Medium::kDram, Medium::kDram));
    CHECK(kit.a->writes_under_way() == 0);
    kit.a->say_drained();
    kit.link_a->close(Error(ErrorCode::kClosed, "the pool is closed"));
    REQUIRE(kit.live(10 * kSecond, [&] { return kit.b->link_ended(); }));
    kit.check_nothing_left();
  }
}

TEST_CASE("a peer that refuses, or that has promised too many blocks, is not measured") {
  ProbeKit kit;
  SessionLimits limits;
  limits.reserved_max = 0;
  kit.there().set_limits(limits);
  kit.measure();
  CHECK_FALSE(kit.is_measured());
  CHECK(kit.fast->writes == 0);
  kit.check_nothing_left();
}

}  // namespace
}  // namespace kvpool::testing
