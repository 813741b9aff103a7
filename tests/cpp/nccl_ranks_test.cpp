// Ranks on fake GPUs whose channels go by NCCL: what ends, fails or is killed in the middle of a pass.
#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "child_process.h"
#include "fake_nccl.h"
#include "fuzz_seeds.h"
#include "peer_process.h"
#include "rank_on_gpu.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kMeeting = 5;
const Error kOver(ErrorCode::kPeerLost, "over");

// Every wait of the fake ends when a test does, however it does.
struct LetGo {
  const FakeNccl& nccl;
  ~LetGo() {
    for (const char* held : {"stall", "linger", "hold_abort"}) nccl.set(held, 0);
  }
};

struct TwoRanks {
  FakeCuda cuda;
  FakeNccl nccl;
  RankHere a{0, {"nccl"}, on_gpu(0)};
  RankHere b{1, {"nccl"}, on_gpu(1)};
  LetGo let_go{nccl};

  TwoRanks() {
    a.channels.meet(meeting_of(kMeeting, {b.metadata()}), in_seconds(60));
    fill(cuda, a, 3, 10);
  }
  // An order of a that stops before its last byte, and whose receiver does not leave before released().
  std::shared_ptr<Outcome> stall(double seconds = 60, std::shared_ptr<std::atomic<bool>>* stop = nullptr) {
    nccl.set("stall", 1);
    nccl.set("linger", 1);
    const std::size_t received = nccl.count("ncclRecv");
    const auto outcome = std::make_shared<Outcome>();
    const auto given = give(a, kMeeting, {{part(1, 0, kPiece)}, {a.at(3)}, {b.at(6)}}, outcome, seconds);
    if (stop != nullptr) *stop = given;
    REQUIRE(soon([&] { return nccl.count("ncclRecv") > received || outcome->reports == 1; }));
    return outcome;
  }
  void release() {
    released = true;
    nccl.set("stall", 0);
    nccl.set("linger", 0);
  }
  std::atomic<bool> released{false};
};

// When a meeting is clear here: there are no more writes in it.
struct Clear {
  std::atomic<int> calls{0};
  std::atomic<bool> early{false};
  std::function<void()> call(const std::atomic<bool>& released) {
    return [this, &released] {
      if (!released) early = true;
      ++calls;
    };
  }
};

TEST_CASE("nccl ranks: a meeting ends only after the content that was arriving in it was given up") {
  for (const std::string first : {"the sender departs", "the receiver departs", "the link ends"}) {
    CAPTURE(first);
    Clear clear_a;
    Clear clear_b;
    TwoRanks ranks;
    const auto outcome = ranks.stall();
    if (first == "the sender departs") {
      ranks.a.channels.depart(kMeeting, kOver, [&] { ++clear_a.calls; });
      ranks.b.channels.depart(kMeeting, kOver, clear_b.call(ranks.released));
    } else if (first == "the receiver departs") {
      ranks.b.channels.depart(kMeeting, kOver, clear_b.call(ranks.released));
      ranks.a.channels.depart(kMeeting, kOver, [&] { ++clear_a.calls; });
    } else {
      ranks.a.channels.abandon();
      ranks.b.channels.depart(kMeeting, kOver, clear_b.call(ranks.released));
      ranks.a.channels.depart(kMeeting, kOver, [&] { ++clear_a.calls; });
    }
    // The sender does not wait for it, and does not report what it cannot know.
    REQUIRE(soon([&] { return outcome->reports == 1; }));
    CHECK(outcome->code == code(ErrorCode::kPeerLost));
    REQUIRE(soon([&] { return ranks.nccl.count("ncclCommAbort") >= 2; }));
    CHECK(soon([&] { return clear_a.calls == 1; }));
    // Nor does any other thread that deals with the receiver.
    ranks.nccl.set("stall", 0);
    RankHere c(2, {"nccl"}, on_gpu(2));
    c.channels.meet(meeting_of(kMeeting + 1, {ranks.b.metadata()}), in_seconds(60));
    fill(ranks.cuda, c, 1, 77);
    const auto other = std::make_shared<Outcome>();
    give(c, kMeeting + 1, {{part(1, 0, kPiece)}, {c.at(1)}, {ranks.b.at(2)}}, other, 60);
    REQUIRE(soon([&] { return other->reports == 1; }));
    CHECK(other->code == -1);
    CHECK(is(ranks.cuda, ranks.b, 2, 77));
    CHECK(clear_b.calls == 0);
    ranks.release();
    CHECK(soon([&] { return clear_b.calls == 1; }));
    CHECK_FALSE(clear_b.early);
    // The two reconnect, and it works.
    ranks.a.channels.meet(meeting_of(kMeeting + 2, {ranks.b.metadata()}), in_seconds(60));
    const auto again = std::make_shared<Outcome>();
    give(ranks.a, kMeeting + 2, {{part(1, 0, kPiece)}, {ranks.a.at(3)}, {ranks.b.at(6)}}, again, 60);
    REQUIRE(soon([&] { return again->reports == 1; }));
    CHECK(again->code == -1);
    CHECK(is(ranks.cuda, ranks.b, 6, 10));
  }
}

TEST_CASE("nccl ranks: an order that is cancelled or too late reports after its receiver has given it up") {
  for (const bool by_deadline : {false, true}) {
    CAPTURE(by_deadline);
    TwoRanks ranks;
    CHECK_FALSE(send(ranks.a, ranks.b, {ranks.a.at(3)}, {ranks.b.at(5)}));  // the communicator is there
    const std::size_t aborted = ranks.nccl.count("ncclCommAbort");
    std::shared_ptr<std::atomic<bool>> stop;
    const auto outcome = ranks.stall(by_deadline ? 10 : 60, &stop);
    if (!by_deadline) stop->store(true);
    REQUIRE(soon([&] { return ranks.nccl.count("ncclCommAbort") >= aborted + 2 || outcome->reports == 1; }));
    usleep(20'000);
    CHECK(outcome->reports == 0);
    ranks.release();
    REQUIRE(soon([&] { return outcome->reports == 1; }));
    CHECK(outcome->code == code(by_deadline ? ErrorCode::kDeadline : ErrorCode::kCancelled));
    fill(ranks.cuda, ranks.b, 6, 1);
    CHECK_FALSE(send(ranks.a, ranks.b, {ranks.a.at(3)}, {ranks.b.at(6)}));
    CHECK(is(ranks.cuda, ranks.b, 6, 10));
  }
}

TEST_CASE("nccl ranks: a failure of NCCL fails the order, not the channel, and sock serves where it is offered") {
  const FakeCuda cuda;
  const FakeNccl nccl;
  for (const bool with_sock : {false, true}) {
    CAPTURE(with_sock);
    std::vector<std::string> routes = {"nccl"};
    if (with_sock) routes.emplace_back("sock");
    RankHere a(0, routes, on_gpu(0));
    RankHere b(1, routes, on_gpu(1));
    a.channels.meet(meeting_of(kMeeting, {b.metadata()}), in_seconds(60));
    fill(cuda, a, 3, 10);
    nccl.set("break_in", 1);
    CHECK(send(a, b, {a.at(3)}, {b.at(6)}) == ErrorCode::kRouteFailed);
    nccl.set("break_in", 0);
    const std::size_t before = nccl.count("ncclSend");
    for (std::uint8_t i = 0; i < 4; ++i) {
      fill(cuda, b, 6, 1);
      CHECK_FALSE(send(a, b, {a.at(3)}, {b.at(6)}));
      CHECK(is(cuda, b, 6, 10));
    }
    CHECK(nccl.count("ncclSend") == before + (with_sock ? 0 : 4));
  }
}

TEST_CASE("nccl ranks: a rank whose GPU is lost while it receives tells its own process, and its sender") {
  // When NCCL notices first, the message has failed without a reason: then again.
  bool told = false;
  for (int tries = 0; tries < 200 && !told; ++tries) {
    TwoRanks ranks;
    const auto outcome = ranks.stall();
    const std::size_t looks = ranks.cuda.count("cuEventQuery");
    REQUIRE(soon([&] { return ranks.cuda.count("cuEventQuery") >= looks + 50; }));  // both are past NCCL's own work
    ranks.nccl.set("linger", 0);
    ranks.cuda.lose(1, 719);
    REQUIRE(soon([&] { return outcome->reports == 1; }));
    CHECK(outcome->code == code(ErrorCode::kRouteFailed));
    for (int looked = 0; looked < 200 && !ranks.b.device_lost; ++looked) usleep(1000);
    told = ranks.b.device_lost;
    CHECK_FALSE(ranks.a.device_lost);
  }
  CHECK(told);
}

TEST_CASE("nccl ranks: threads that read links never wait for an abort of NCCL") {
  TwoRanks ranks;
  CHECK_FALSE(send(ranks.a, ranks.b, {ranks.a.at(3)}, {ranks.b.at(5)}));
  CHECK_FALSE(send(ranks.b, ranks.a, {ranks.b.at(5)}, {ranks.a.at(6)}));
  ranks.nccl.set("hold_abort", 1);
  std::thread departing([&] { ranks.a.channels.depart(kMeeting, kOver, {}); });
  REQUIRE(soon([&] { return ranks.nccl.count("ncclCommAbort") >= 2; }));
  RankHere c(2, {"nccl"}, on_gpu(2));
  c.channels.meet(meeting_of(kMeeting + 1, {ranks.a.metadata(), ranks.b.metadata()}), in_seconds(60));
  const auto outcome = std::make_shared<Outcome>();
  give(c, kMeeting + 1, {{part(0, 0, kPiece), part(1, 0, kPiece)}, {c.at(1)}, {ranks.b.at(2)}}, outcome, 60);
  CHECK(soon([&] { return outcome->reports == 1; }));
  CHECK(outcome->code == -1);
  ranks.nccl.set("hold_abort", 0);
  departing.join();
  Clear clear;
  ranks.released = true;
  for (RankHere* side : {&ranks.a, &ranks.b}) side->channels.depart(kMeeting, kOver, clear.call(ranks.released));
  CHECK(soon([&] { return clear.calls == 2; }));
  CHECK(soon([&] { return ranks.nccl.count("communicators") == 4; }));  // those of c
}

TEST_CASE("nccl ranks: the process of a rank is killed in a pass, at either side") {
  if (!test::kChildMayStartThreads) return;
  for (const bool sender_dies : {true, false}) {
    CAPTURE(sender_dies);
    RankSpec far = on_gpu(1);
    far.listen = "unix:@kvpool-nccl-rank-" + std::to_string(getpid()) + (sender_dies ? "-s" : "-r");
    PeerProcess other([&](const auto& wait) {
      const FakeCuda cuda;
      const FakeNccl nccl;
      RankHere b(1, {"nccl"}, far);
      if (!wait()) return 1;
      if (sender_dies) {
        nccl.set("stall", 1);
        give(b, kMeeting, {{part(0, 0, kPiece)}, {b.at(1)}, {b.at(6)}}, std::make_shared<Outcome>(), 60);
      }
      wait();
      return 0;
    });
    Clear clear;
    std::atomic<bool> released{false};
    const FakeCuda cuda;
    const FakeNccl nccl;
    RankHere a(0, {"nccl"}, on_gpu(0));
    const LetGo let_go{nccl};
    nccl.set("stall", 1);
    nccl.set("linger", 1);
    const MetadataRank metadata{1, RankHere::incarnation_of(0, 1), far.listen};
    REQUIRE(
        soon([&] { return !error_of([&] { a.channels.meet(meeting_of(kMeeting, {metadata}), in_seconds(30)); }); }));
    const auto outcome = std::make_shared<Outcome>();
    if (!sender_dies) give(a, kMeeting, {{part(1, 0, kPiece)}, {a.at(3)}, {a.at(6)}}, outcome, 60);
    other.go();
    REQUIRE(soon([&] { return nccl.count(sender_dies ? "ncclRecv" : "ncclSend") >= 1; }));
    CHECK(other.kill_and_wait() == -SIGKILL);
    if (!sender_dies) {
      REQUIRE(soon([&] { return outcome->reports == 1; }));
      CHECK(outcome->code == code(ErrorCode::kPeerLost));
    }
    a.channels.depart(kMeeting, kOver, clear.call(released));
    REQUIRE(soon([&] { return nccl.count("ncclCommAbort") >= 1; }));
    usleep(20'000);
    if (sender_dies) CHECK(clear.calls == 0);
    released = true;
    nccl.set("linger", 0);
    CHECK(soon([&] { return clear.calls == 1; }));
    if (sender_dies) CHECK_FALSE(clear.early);
    CHECK(soon([&] { return nccl.count("communicators") == 0; }));
  }
}

TEST_CASE("nccl ranks: orders that are stopped, fail or lose their meeting report once, and the meeting is cleared") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("nccl ranks", seed);
    Dice dice(seed);
    const FakeCuda cuda;
    const FakeNccl nccl;
    cuda.set("delay_us", 10);
    RankHere a(0, {"nccl"}, on_gpu(0));
    RankHere b(1, {"nccl"}, on_gpu(1));
    std::atomic<int> clear{0};
    for (int meeting = 1; meeting <= fuzz_length(4); ++meeting) {
      a.channels.meet(meeting_of(static_cast<std::uint64_t>(meeting), {b.metadata()}), in_seconds(60));
      nccl.set("break_in", dice.one_in(2) ? static_cast<int>(1 + dice.below(12)) : 0);
      std::vector<std::shared_ptr<Outcome>> outcomes(12);
      for (auto& outcome : outcomes) outcome = std::make_shared<Outcome>();
      std::atomic<std::size_t> ended{0};
      std::vector<std::thread> threads;
      for (std::size_t t = 0; t < 3; ++t) {
        threads.emplace_back([&, t, seed_of_thread = dice.any()] {
          Dice own(seed_of_thread);
          for (std::size_t i = t; i < outcomes.size(); i += 3) {
            RankHere& from = own.one_in(2) ? a : b;
            RankHere& to = &from == &a ? b : a;
            const std::size_t block = t * 2;  // one per thread: threads do not write the same bytes
            const auto stop =
                give(from, static_cast<std::uint64_t>(meeting),
                     {{part(to.number, 0, kPiece)}, {from.at(block + 1)}, {to.at(block)}}, outcomes[i], 60);
            if (own.one_in(6)) stop->store(true);
            while (outcomes[i]->reports == 0) usleep(100);
            ++ended;
          }
        });
      }
      const std::size_t until = dice.below(outcomes.size() + 1);
      while (ended < until) usleep(100);
      a.channels.depart(static_cast<std::uint64_t>(meeting), kOver, [&] { ++clear; });
      b.channels.depart(static_cast<std::uint64_t>(meeting), kOver, [&] { ++clear; });
      for (std::thread& thread : threads) thread.join();
      for (const auto& outcome : outcomes) CHECK(outcome->reports == 1);
      CHECK(soon([&] { return clear == 2 * meeting; }));
    }
    CHECK(soon([&] { return nccl.count("communicators") == 0; }));
    CHECK(nccl.count("mismatches") == 0);
  }
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
