// Ranks of this process that meet over real sockets, with nothing above them.
#include "kvpool/pool/rank_lanes.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "endpoint_fixture.h"
#include "fuzz_seeds.h"
#include "kvpool/pool/workers.h"
#include "pool_fixture.h"

namespace kvpool {
namespace {

using testing::error_of;
using testing::fresh_name;
using testing::in_seconds;
using testing::soon;

constexpr std::size_t kPiece = std::size_t{512} << 10;  // a block does not fit into a socket's buffer

ServiceOptions options_of(const std::string& name, const std::string& route) {
  ServiceOptions options;
  options.name = name;
  options.secret = "s3cret";
  options.routes = {route};
  return options;
}

// A rank as its own process would have it.
struct RankHere {
  RankHere(std::uint32_t number, const std::string& route)
      : number(number),
        epoch(1000 + number),
        pool(std::make_shared<Pool>([] {
          PoolOptions options = testing::small_options(8, 0);
          options.layout.piece_bytes = {kPiece};
          return options;
        }())),
        memory{pool->layout(), {pool->arena(Medium::kHbm), pool->arena(Medium::kDram)}},
        routes(options_of("rank", route), memory, epoch),
        reactor(Reactor::make("rank")),
        ghosts(*reactor, workers),
        lanes(routes, strands, ghosts) {
    pool->set_instance(number + 1);
    endpoint = Endpoint::make(
        *reactor, {.secret = "s3cret"}, [this] { return introduce(); },
        [this](const std::shared_ptr<Link>& link, const PeerCard& card, bool) { return lanes.admit(link, card); });
    lanes.start(*endpoint);
    address = endpoint->listen(fresh_name("unix:@"));
  }
  ~RankHere() {
    endpoint->close();
    lanes.depart_all(Error(ErrorCode::kClosed, "the test is over"), {});
    workers.stop();
    strands.stop();
    reactor->stop();
    ghosts.clear([](const auto& /*party*/, const auto& /*link*/) {});
  }

  Introduction introduce() {
    Introduction own;
    own.attachment = routes.introduce(own.card);
    own.card.name = "rank-" + std::to_string(number);
    own.card.epoch = epoch;
    own.card.instance = number + 1;
    own.card.rank_of = 7;
    own.card.rank = number;
    own.card.address = address;
    own.descriptors = routes.descriptors();
    return own;
  }
  CardRank card() const { return {number, epoch, address}; }
  std::byte* block(std::size_t i) const {
    const Segment& segment = pool->arena(Medium::kHbm)->segments()[0];
    return segment.base + i * segment.stride;
  }
  Address at(std::size_t i) const { return all[i]; }

  const std::uint32_t number;
  const std::uint64_t epoch;
  std::shared_ptr<Pool> pool;
  const LocalMemory memory;
  RouteMaker routes;
  Workers workers{2};
  Strands strands;
  std::unique_ptr<Reactor> reactor;
  Ghosts ghosts;
  RankLanes lanes;
  std::string address;
  std::unique_ptr<Endpoint> endpoint;
  const std::vector<Address> all = testing::alloc(*pool, 8);
};

// What an order came to.
struct Outcome {
  std::atomic<int> reports{0};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<int> code{-1};  // of its error
};

struct Order {
  std::vector<LaneWrite> lanes;
  std::vector<Address> from;
  std::vector<Address> to;
};

std::shared_ptr<std::atomic<bool>> give(RankHere& rank, std::uint64_t meeting, Order&& given,
                                        const std::shared_ptr<Outcome>& outcome, double seconds = 10) {
  const auto kept = std::make_shared<const Order>(std::move(given));
  LaneOrder order;
  order.meeting = meeting;
  order.lanes = kept->lanes;
  order.request.from = kept->from;
  order.request.to = kept->to;
  order.request.deadline_ns = in_seconds(seconds);
  order.keep = kept;
  order.stop = std::make_shared<std::atomic<bool>>(false);
  order.report = [outcome](const WriteOutcome& written, const Error* error) {
    outcome->bytes += written.bytes;
    if (error != nullptr) outcome->code = static_cast<int>(error->code());
    ++outcome->reports;
  };
  auto stop = order.stop;
  rank.lanes.write(std::move(order));
  return stop;
}

LaneWrite part(std::uint32_t to, std::uint64_t first, std::uint64_t bytes) {
  return {to, bytes, {{first, first, bytes}}};
}

int code(ErrorCode code) { return static_cast<int>(code); }

MeetBody meeting_of(std::uint64_t number, std::vector<CardRank> ranks) { return {number, "peer", 0, std::move(ranks)}; }

const std::vector<std::string> kRoutes = {"loopback", "shm", "sock"};

TEST_CASE("an order reports once, when the parts of all its lanes are in place") {
  for (const std::string& route : kRoutes) {
    CAPTURE(route);
    RankHere a(0, route);
    RankHere b(1, route);
    RankHere c(2, route);
    a.lanes.meet(meeting_of(5, {b.card(), c.card()}), in_seconds(5));
    std::memset(a.block(3), 33, kPiece);
    const auto outcome = std::make_shared<Outcome>();
    give(a, 5, {{part(1, 0, kPiece / 2), part(2, kPiece / 2, kPiece / 2)}, {a.at(3)}, {b.at(6)}}, outcome);
    REQUIRE(soon([&] { return outcome->reports == 1; }));
    CHECK(outcome->code == -1);
    CHECK(outcome->bytes == kPiece);
    CHECK(b.block(6)[0] == std::byte{33});
    CHECK(b.block(6)[kPiece / 2 - 1] == std::byte{33});
    CHECK(b.block(6)[kPiece / 2] == std::byte{0});
    CHECK(c.block(6)[kPiece - 1] == std::byte{33});
    CHECK(outcome->reports == 1);
  }
}

TEST_CASE("after departing no lane of that meeting begins, and both sides hear that nobody writes") {
  for (const std::string& route : kRoutes) {
    CAPTURE(route);
    RankHere a(0, route);
    RankHere b(1, route);
    a.lanes.meet(meeting_of(5, {b.card()}), in_seconds(5));
    std::atomic<int> clear{0};
    const Error why(ErrorCode::kPeerLost, "over");
    a.lanes.depart(5, why, [&] { ++clear; });
    REQUIRE(soon([&] { return clear == 1; }));
    b.lanes.depart(5, why, [&] { ++clear; });
    REQUIRE(soon([&] { return clear == 2; }));
    const auto outcome = std::make_shared<Outcome>();
    give(a, 5, {{part(1, 0, kPiece)}, {a.at(0)}, {b.at(0)}}, outcome);
    REQUIRE(soon([&] { return outcome->reports == 1; }));
    CHECK(outcome->code == code(ErrorCode::kPeerLost));
    for (RankHere* side : {&a, &b}) {
      const CardRank other = side == &a ? b.card() : a.card();
      const auto refused = error_of([&] { side->lanes.meet(meeting_of(5, {other}), in_seconds(5)); });
      REQUIRE(refused);
      CHECK(refused->code() == ErrorCode::kPeerLost);
    }
    a.lanes.meet(meeting_of(6, {b.card()}), in_seconds(5));  // another one
  }
}

TEST_CASE("an order that is there before its lanes waits for them, to its deadline or until it is stopped") {
  RankHere a(0, "shm");
  RankHere b(1, "shm");
  const auto stopped = std::make_shared<Outcome>();
  const auto late = std::make_shared<Outcome>();
  const auto done = std::make_shared<Outcome>();
  give(a, 5, {{part(9, 0, kPiece)}, {a.at(0)}, {b.at(0)}}, stopped)->store(true);
  give(a, 5, {{part(8, 0, kPiece)}, {a.at(0)}, {b.at(0)}}, late, 0.05);
  give(a, 5, {{part(1, 0, kPiece)}, {a.at(0)}, {b.at(0)}}, done);
  REQUIRE(soon([&] { return stopped->reports + late->reports == 2; }));
  CHECK(stopped->code == code(ErrorCode::kCancelled));
  CHECK(late->code == code(ErrorCode::kDeadline));
  CHECK(done->reports == 0);
  b.lanes.meet(meeting_of(5, {a.card()}), in_seconds(5));  // whoever connects
  REQUIRE(soon([&] { return done->reports == 1; }));
  CHECK(done->code == -1);
}

TEST_CASE("what does not exist is not written, and who is looked for is found or nobody") {
  RankHere a(0, "shm");
  RankHere b(1, "shm");
  a.lanes.meet(meeting_of(5, {b.card()}), in_seconds(5));
  const Address beyond = b.at(0) + 100;
  const std::vector<Order> wrong = {{{part(1, 0, kPiece)}, {a.at(0)}, {beyond}},
                                    {{part(1, 0, kPiece)}, {beyond}, {b.at(0)}},
                                    {{part(1, 1, kPiece)}, {a.at(0)}, {b.at(0)}}};
  for (Order order : wrong) {
    const auto outcome = std::make_shared<Outcome>();
    give(a, 5, std::move(order), outcome);
    REQUIRE(soon([&] { return outcome->reports == 1; }));
    CHECK(outcome->code == code(ErrorCode::kArgument));
  }
  CardRank other = b.card();
  other.epoch = 1;  // an earlier incarnation
  const auto gone = error_of([&] { a.lanes.meet(meeting_of(6, {other}), in_seconds(5)); });
  REQUIRE(gone);
  CHECK(gone->code() == ErrorCode::kPeerLost);
  const auto again = error_of([&] { a.lanes.meet(meeting_of(5, {b.card()}), in_seconds(5)); });
  REQUIRE(again);
  CHECK(again->code() == ErrorCode::kState);
}

TEST_CASE("a lane that is broken is not hidden by an earlier failure, and leaves no descriptor") {
  RankHere a(0, "sock");
  RankHere b(1, "sock");
  RankHere c(2, "sock");
  const int before = testing::open_descriptors();
  a.lanes.meet(meeting_of(5, {b.card(), c.card()}), in_seconds(5));
  // The rank c reads nothing for a while.
  std::atomic<bool> held{false};
  std::atomic<bool> go_on{false};
  c.reactor->at(monotonic_ns(), [&] {
    held = true;
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  REQUIRE(soon([&] { return held.load(); }));
  const auto outcome = std::make_shared<Outcome>();
  // Refused at once for b; c is stopped in the middle of a frame.
  Order order{{part(2, 0, kPiece), part(1, 1, kPiece)}, {}, {}};
  for (int i = 0; i < 8; ++i) {
    order.from.push_back(a.at(static_cast<std::size_t>(i)));
    order.to.push_back(b.at(static_cast<std::size_t>(i)));
  }
  give(a, 5, std::move(order), outcome);
  REQUIRE(soon([&] { return outcome->reports == 1; }));
  CHECK(outcome->code == code(ErrorCode::kPeerLost));
  go_on = true;
  const Error why(ErrorCode::kPeerLost, "over");
  std::atomic<int> clear{0};
  for (RankHere* side : {&a, &b, &c}) side->lanes.depart(5, why, [&] { ++clear; });
  CHECK(soon([&] { return clear == 3; }));
  CHECK(soon([&] { return testing::open_descriptors() <= before; }));
}

TEST_CASE("fuzz: orders of many threads report once each, and every meeting that is departed from is cleared") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("rank lanes", seed);
    testing::Dice dice(seed);
    for (const std::string& route : kRoutes) {
      RankHere a(0, route);
      RankHere b(1, route);
      std::atomic<int> clear{0};
      int meetings = 0;
      for (int step = 0; step < testing::fuzz_length(6); ++step) {
        const auto meeting = static_cast<std::uint64_t>(++meetings);
        std::vector<std::shared_ptr<Outcome>> outcomes(24);
        for (auto& outcome : outcomes) outcome = std::make_shared<Outcome>();
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < 4; ++t) {
          threads.emplace_back([&, t, seed_of_thread = dice.any()] {
            testing::Dice own(seed_of_thread);
            for (std::size_t i = t; i < outcomes.size(); i += 4) {
              RankHere& from = own.one_in(2) ? a : b;
              RankHere& to = &from == &a ? b : a;
              const std::size_t block = (t % 4) * 2;  // of its own: threads do not write the same bytes
              const auto stop = give(from, meeting,
                                     {{part(to.number, 0, kPiece)}, {from.at(block + 1)}, {to.at(block)}}, outcomes[i]);
              if (own.one_in(6)) stop->store(true);
              while (outcomes[i]->reports == 0) std::this_thread::yield();
            }
          });
        }
        const auto met = error_of([&] { a.lanes.meet(meeting_of(meeting, {b.card()}), in_seconds(5)); });
        if (dice.one_in(2)) std::this_thread::sleep_for(std::chrono::milliseconds(dice.below(20)));
        const Error why(ErrorCode::kPeerLost, "over");
        a.lanes.depart(meeting, why, [&] { ++clear; });
        b.lanes.depart(meeting, why, [&] { ++clear; });
        for (std::thread& thread : threads) thread.join();
        for (const auto& outcome : outcomes) CHECK(outcome->reports == 1);
        CHECK_FALSE(met);
        CHECK(soon([&] { return clear == 2 * meetings; }));
      }
    }
  }
}

}  // namespace
}  // namespace kvpool
