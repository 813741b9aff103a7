// Ranks of this process that connect over real sockets, with nothing above them.
#include "kvpool/ranks/rank_channels.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/clock.h"
#include "rank_here.h"
#include "soon.h"

namespace kvpool::testing {
namespace {

const std::vector<std::string> kRoutes = {"loopback", "shm", "sock"};

TEST_CASE("an order reports once, when the parts of all its channels are in place") {
  for (const std::string& route : kRoutes) {
    CAPTURE(route);
    RankHere a(0, {route});
    RankHere b(1, {route});
    RankHere c(2, {route});
    a.channels.meet(meeting_of(5, {b.metadata(), c.metadata()}), in_seconds(5));
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

TEST_CASE("after the parting of a meeting none of its channels begins a write, and both sides learn it") {
  for (const std::string& route : kRoutes) {
    CAPTURE(route);
    RankHere a(0, {route});
    RankHere b(1, {route});
    a.channels.meet(meeting_of(5, {b.metadata()}), in_seconds(5));
    std::atomic<int> clear{0};
    const Error why(ErrorCode::kPeerLost, "over");
    a.channels.depart(5, why, [&] { ++clear; });
    REQUIRE(soon([&] { return clear == 1; }));
    b.channels.depart(5, why, [&] { ++clear; });
    REQUIRE(soon([&] { return clear == 2; }));
    const auto outcome = std::make_shared<Outcome>();
    give(a, 5, {{part(1, 0, kPiece)}, {a.at(0)}, {b.at(0)}}, outcome);
    REQUIRE(soon([&] { return outcome->reports == 1; }));
    CHECK(outcome->code == code(ErrorCode::kPeerLost));
    for (RankHere* side : {&a, &b}) {
      const MetadataRank other = side == &a ? b.metadata() : a.metadata();
      const auto refused = error_of([&] { side->channels.meet(meeting_of(5, {other}), in_seconds(5)); });
      REQUIRE(refused);
      CHECK(refused->code() == ErrorCode::kPeerLost);
    }
    a.channels.meet(meeting_of(6, {b.metadata()}), in_seconds(5));  // another one
  }
}

TEST_CASE("an order that comes before its channels waits for them until its deadline or until it is stopped") {
  RankHere a(0, {"shm"});
  RankHere b(1, {"shm"});
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
  b.channels.meet(meeting_of(5, {a.metadata()}), in_seconds(5));  // whichever side connects
  REQUIRE(soon([&] { return done->reports == 1; }));
  CHECK(done->code == -1);
}

TEST_CASE("parts whose channels never come hold no threads and delay no other order") {
  RankHere a(0, {"shm"});
  RankHere b(1, {"shm"});
  const auto silent = std::make_shared<Outcome>();
  constexpr int kSilent = 200;  // more than there are threads for
  for (std::uint32_t i = 0; i < kSilent; ++i) {
    give(a, 5, {{part(100 + i, 0, kPiece / 2), part(1000 + i, kPiece / 2, kPiece / 2)}, {a.at(0)}, {b.at(0)}}, silent,
         60);
  }
  a.channels.meet(meeting_of(6, {b.metadata()}), in_seconds(5));
  const auto done = std::make_shared<Outcome>();
  give(a, 6, {{part(1, 0, kPiece)}, {a.at(0)}, {b.at(0)}}, done, 60);
  REQUIRE(soon([&] { return done->reports == 1; }));
  CHECK(done->code == -1);
  CHECK(silent->reports == 0);
  CHECK(a.executor.threads() < 16);
  a.channels.depart(5, Error(ErrorCode::kPeerLost, "over"), {});
  REQUIRE(soon([&] { return silent->reports == kSilent; }));
  CHECK(silent->code == code(ErrorCode::kPeerLost));
}

// The watch used to be a task of the class that writes, and waited for a thread behind writes that stood still.
TEST_CASE("an order without a channel ends at its deadline even if every thread that writes is blocked") {
  RankHere a(0, {"shm"});
  std::promise<void> go;
  const std::shared_future<void> gate(go.get_future());
  const std::vector<int> keys(static_cast<std::size_t>(SerialExecutor::kLimits.most) + 1);
  for (const int& key : keys) a.serial_executor.run(&key, Priority::kDecode, [gate] { gate.wait(); });
  const auto late = std::make_shared<Outcome>();
  give(a, 5, {{part(8, 0, kPiece)}, {a.at(0)}, {a.at(0)}}, late, 0.05);
  CHECK(soon([&] { return late->reports == 1; }));
  CHECK(late->code == code(ErrorCode::kDeadline));
  go.set_value();
}

TEST_CASE("parts that do not exist are not written, and a channel reaches only the rank that it was made for") {
  RankHere a(0, {"shm"});
  RankHere b(1, {"shm"});
  a.channels.meet(meeting_of(5, {b.metadata()}), in_seconds(5));
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
  MetadataRank other = b.metadata();
  other.incarnation = 1;  // an earlier incarnation
  const auto gone = error_of([&] { a.channels.meet(meeting_of(6, {other}), in_seconds(5)); });
  REQUIRE(gone);
  CHECK(gone->code() == ErrorCode::kPeerLost);
  const auto again = error_of([&] { a.channels.meet(meeting_of(5, {b.metadata()}), in_seconds(5)); });
  REQUIRE(again);
  CHECK(again->code() == ErrorCode::kState);
}

TEST_CASE("an earlier failure does not hide a broken channel, and no descriptor is left") {
  RankHere a(0, {"sock"});
  RankHere b(1, {"sock"});
  RankHere c(2, {"sock"});
  const int before = open_descriptors();
  a.channels.meet(meeting_of(5, {b.metadata(), c.metadata()}), in_seconds(5));
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
  for (RankHere* side : {&a, &b, &c}) side->channels.depart(5, why, [&] { ++clear; });
  CHECK(soon([&] { return clear == 3; }));
  CHECK(soon([&] { return open_descriptors() <= before; }));
}

TEST_CASE("fuzz: orders of many threads report once each, and every meeting that is departed from is cleared") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("rank channels", seed);
    Dice dice(seed);
    for (const std::string& route : kRoutes) {
      RankHere a(0, {route});
      RankHere b(1, {route});
      std::atomic<int> clear{0};
      int meetings = 0;
      for (int step = 0; step < fuzz_length(6); ++step) {
        const auto meeting = static_cast<std::uint64_t>(++meetings);
        std::vector<std::shared_ptr<Outcome>> outcomes(24);
        for (auto& outcome : outcomes) outcome = std::make_shared<Outcome>();
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < 4; ++t) {
          threads.emplace_back([&, t, seed_of_thread = dice.any()] {
            Dice own(seed_of_thread);
            for (std::size_t i = t; i < outcomes.size(); i += 4) {
              RankHere& from = own.one_in(2) ? a : b;
              RankHere& to = &from == &a ? b : a;
              const std::size_t block = (t % 4) * 2;  // one per thread: threads do not write the same bytes
              const auto stop = give(from, meeting,
                                     {{part(to.number, 0, kPiece)}, {from.at(block + 1)}, {to.at(block)}}, outcomes[i]);
              if (own.one_in(6)) stop->store(true);
              sleep_while([&] { return outcomes[i]->reports == 0; });
            }
          });
        }
        const auto met = error_of([&] { a.channels.meet(meeting_of(meeting, {b.metadata()}), in_seconds(5)); });
        if (dice.one_in(2)) std::this_thread::sleep_for(std::chrono::milliseconds(dice.below(20)));
        const Error why(ErrorCode::kPeerLost, "over");
        a.channels.depart(meeting, why, [&] { ++clear; });
        b.channels.depart(meeting, why, [&] { ++clear; });
        for (std::thread& thread : threads) thread.join();
        for (const auto& outcome : outcomes) CHECK(outcome->reports == 1);
        CHECK_FALSE(met);
        CHECK(soon([&] { return clear == 2 * meetings; }));
      }
    }
  }
}

}  // namespace
}  // namespace kvpool::testing
