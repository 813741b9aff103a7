// The limits of the receiving half of the protocol, against a peer that asks for too much.
#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kvpool/routes/route_receiver.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kId = 5;

TEST_CASE("a peer that begins endless transfers to lent blocks is disconnected") {
  SessionKit kit(/*one_sided=*/false);
  kit.host.limits_of.reserved_max = kit.host.limits_of.transfers_max = 2;
  const Addresses lent = kit.lend(50, 1);
  const auto begin = [&](std::uint64_t id) { return code_of([&] { static_cast<void>(kit.place(id, lent)); }); };
  std::uint64_t id = kId;
  while (id < kId + 100'000 && !begin(id)) ++id;
  CHECK(begin(id) == ErrorCode::kProtocol);
  CHECK_FALSE(begin(kId).has_value());
  kit.ask(kAbandonVerb, kId);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK_FALSE(begin(id).has_value());
}

// Each leave used to add a piece of work for a thread, and a peer that sent thousands filled the memory.
TEST_CASE("of a peer's leaves only the first gives a thread work") {
  SessionKit kit;
  kit.say(FrameKind::kLeave, 0);
  REQUIRE(kit.host.works.size() == 1);
  for (int again = 0; again < 3; ++again) kit.say(FrameKind::kLeave, 0);
  CHECK(kit.host.works.size() == 1);
  kit.host.run_works();
  CHECK(kit.host.drained_calls == 1);
  CHECK(kit.session->peer_drained());
}

TEST_CASE("a peer's work in progress is limited, and the refusal says when to try again") {
  SessionKit kit;
  kit.host.limits_of.reserved_max = 4;
  kit.host.limits_of.transfers_max = 2;
  static_cast<void>(kit.reserve(1, SessionKit::reservation(3)));
  kit.ask(kReserveVerb, 2, write_body(SessionKit::reservation(2)));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  kit.ask(kLendVerb, 3, write_body(LendBody{2, Medium::kHbm, false}));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  static_cast<void>(kit.reserve(4, SessionKit::reservation(1)));
  kit.ask(kReserveVerb, 5, write_body(SessionKit::reservation(0)));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  // Blocks that are quarantined for it count, too.
  kit.session->tick(kit.host.now + 1001 * kMs);
  kit.ask(kReserveVerb, 6, write_body(SessionKit::reservation(1)));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  kit.ask(kAbandonVerb, 1);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  static_cast<void>(kit.reserve(7, SessionKit::reservation(3)));
}

TEST_CASE("the memory that a peer's requests take is limited, however few they are") {
  SessionKit kit;
  const auto insertion = [](Token id) {
    ReserveBody body = SessionKit::reservation(2);
    body.insert = true;
    body.name_space = "ab";
    body.tokens = prompt(id, 2);
    return body;
  };
  const std::size_t one = 2 + 2 * kPage * sizeof(Token);
  kit.host.limits_of.request_bytes_max = 2 * one + 1;
  static_cast<void>(kit.reserve(1, insertion(1)));
  static_cast<void>(kit.reserve(2, insertion(2)));
  kit.ask(kReserveVerb, 3, write_body(insertion(3)));
  const Message refused = kit.answer();
  REQUIRE(refused.kind == FrameKind::kRefused);
  CHECK(read_error(refused.body).code() == ErrorCode::kBusy);
  CHECK(kit.count(BlockState::kReserved) == 4);
  CHECK(kit.session->counts().promised == 4);
  static_cast<void>(kit.reserve(3, SessionKit::reservation(1)));  // without a prompt
  SUBCASE("a cancelled transfer makes room") {
    kit.ask(kAbandonVerb, 1);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
  }
  SUBCASE("a completed transfer makes room") {
    kit.ask(kCompleteVerb, 1, write_body(kit.completion(2)));
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    kit.pool->unpin(&kit.received.pop(0)->pin, 1);
  }
  SUBCASE("a late transfer makes room") { kit.session->tick(kit.host.now + 1001 * kMs); }
  kit.host.now += 1001 * kMs;
  static_cast<void>(kit.reserve(4, insertion(4)));
}

TEST_CASE("a reservation that is refused, or given up before it has blocks, takes no memory") {
  SessionKit kit(/*one_sided=*/true, /*hbm_blocks=*/2);
  ReserveBody body = SessionKit::reservation(2);
  body.insert = true;
  body.tokens = prompt(1, 2);
  kit.host.limits_of.request_bytes_max = body.tokens.size() * sizeof(Token);
  const Addresses cached = alloc(*kit.pool, 2);
  static_cast<void>(insert(kit.pool, prompt(7, 2), cached));
  kit.ask(kReserveVerb, 1, write_body(body));  // no room
  CHECK(kit.refusal() == ErrorCode::kOutOfBlocks);
  body.may_evict = true;
  kit.ask(kReserveVerb, 2, write_body(body));
  CHECK(kit.link->sent.empty());  // room is being made
  kit.ask(kReserveVerb, 3, write_body(body));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  kit.ask(kAbandonVerb, 2);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  kit.host.run_works();
  CHECK(kit.refusal() == ErrorCode::kCancelled);
  CHECK(kit.reserve(4, body).size() == 2);
}

TEST_CASE("the queue of blocks to verify is limited, and a refused transfer leaves nothing") {
  SessionKit kit;
  const Addresses lent = kit.lend(50, 1);
  const auto completion = [&](const Addresses& blocks) {
    CompleteBody body = kit.completion(blocks.size());
    body.has_checksum = true;
    body.checksum = kit.peer_blocks.checksum(blocks);
    return body;
  };
  const Addresses first = kit.reserve(1, SessionKit::reservation(2));
  const Addresses second = kit.reserve(2, SessionKit::reservation(2));
  kit.host.limits_of.request_bytes_max = 5;  // of private bytes each completion has 3
  kit.ask(kCompleteVerb, 1, write_body(completion(first)));
  CHECK(kit.link->sent.empty());
  kit.ask(kCompleteVerb, 2, write_body(completion(second)));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  CompleteBody named = completion(lent);
  named.named = lent;
  kit.ask(kCompleteVerb, 3, write_body(named));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  CHECK(kit.count(BlockState::kReserved) == 2);
  CHECK(kit.count(BlockState::kLent) == 1);
  kit.host.run_works();
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  kit.host.limits_of.request_bytes_max = 3 + sizeof(Address);
  kit.ask(kCompleteVerb, 4, write_body(named));
  kit.host.run_works();
  CHECK(kit.answer().kind == FrameKind::kAnswer);
}

// Content arrives when the test says so.
struct Stalled final : RouteReceiver {
  void begin(Admit, Placed, Lost) override {}
  void on_message(Message&&) override {}
  bool defer(std::function<void()>& work) override {
    works.push_back(std::move(work));
    return true;
  }
  void close(std::function<void()> on_closed) noexcept override { works.push_back(std::move(on_closed)); }
  void arrive() {
    for (const auto& work : std::exchange(works, {})) work();
  }
  std::vector<std::function<void()>> works;
};

TEST_CASE("a peer with too much queued behind unfinished content is disconnected") {
  SessionKit kit;
  const auto stalled = std::make_shared<Stalled>();
  const auto route = std::make_shared<ScriptRoute>(true);
  route->route_receiver_of = stalled;
  const auto session = std::make_shared<Session>(kit.host, kit.session->peer(), true);
  session->start(kit.link, {route});
  kit.host.limits_of.request_bytes_max = 4096;
  const Message complete{FrameKind::kCall, kCompleteVerb.number, 1, write_body(kit.completion(2))};
  const auto say = [&] { session->on_message(Message(complete)); };
  std::size_t said = 0;
  while (said < 4096 && !code_of(say)) ++said;
  CHECK(said > 8);
  CHECK(said < 4096 / complete.body.size());
  CHECK(stalled->works.size() == said);
  stalled->arrive();
  kit.link->sent.clear();
  CHECK_FALSE(code_of(say));
  stalled->works.clear();  // they keep the session
  session->on_closed(Error(ErrorCode::kPeerLost, "the test ends"));
  stalled->arrive();
}

TEST_CASE("a peer that takes its leave behind unfinished content has left, also when the link ends before that") {
  for (const bool leaves : {false, true}) {
    SessionKit kit;
    const auto stalled = std::make_shared<Stalled>();
    const auto route = std::make_shared<ScriptRoute>(true);
    route->route_receiver_of = stalled;
    const auto session = std::make_shared<Session>(kit.host, kit.session->peer(), true);
    session->start(kit.link, {route});
    session->on_message(Message{FrameKind::kCall, kLendVerb.number, 1, write_body(LendBody{2, Medium::kHbm, false})});
    stalled->arrive();
    CHECK(kit.count(BlockState::kLent) == 2);
    if (leaves) session->on_message(Message{FrameKind::kLeave, 0, 0, {}});
    session->on_closed(Error(ErrorCode::kPeerLost, "the link has ended"));
    CHECK(kit.count(BlockState::kLent) == 2);
    stalled->arrive();
    CHECK(kit.count(BlockState::kFree) == (leaves ? 16 : 14));
    CHECK(session->said_over() == leaves);
    if (!leaves) session->on_writer_gone();
    stalled->arrive();
    CHECK(kit.count(BlockState::kFree) == 16);
  }
}

TEST_CASE("a slow application makes its peers wait, and nothing is lost") {
  SessionKit kit(/*one_sided=*/true, 16, /*received_max=*/1);
  for (std::uint64_t id = 1; id <= 2; ++id) {
    static_cast<void>(kit.reserve(id, SessionKit::reservation(2)));
    kit.ask(kCompleteVerb, id, write_body(kit.completion(2)));
    if (id == 1) CHECK(kit.answer().kind == FrameKind::kAnswer);
  }
  CHECK(kit.refusal() == ErrorCode::kBusy);
  CHECK(kit.count(BlockState::kActive) == 2);
  CHECK(kit.count(BlockState::kFree) == 14);
  CHECK(kit.received.pop(0) != nullptr);
  static_cast<void>(kit.reserve(3, SessionKit::reservation(2)));
  kit.ask(kCompleteVerb, 3, write_body(kit.completion(2)));
  CHECK(kit.answer().kind == FrameKind::kAnswer);
}

}  // namespace
}  // namespace kvpool::testing
