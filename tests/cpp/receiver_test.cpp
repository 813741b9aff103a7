// The receiving half of the protocol, against a peer that follows a script.
#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvpool/routes/route_receiver.h"
#include "one_thread.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

KVPOOL_ONE_THREAD;

constexpr std::uint64_t kId = 5;

TEST_CASE("a completed reservation becomes the application's, and is reported once") {
  SessionKit kit;
  const Addresses blocks = kit.reserve(kId, SessionKit::reservation(3));
  CHECK(kit.count(BlockState::kReserved) == 3);
  kit.ask(kCompleteVerb, kId, write_body(kit.completion(3)));
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  const auto item = kit.received.pop(0);
  REQUIRE(item != nullptr);
  CHECK(item->addresses == blocks);
  CHECK(item->peer == "peer");
  CHECK(kit.count(BlockState::kActive) == 3);
  kit.ask(kCompleteVerb, kId, write_body(kit.completion(3)));
  CHECK(kit.refusal() == ErrorCode::kDeadline);
  CHECK(kit.received.pop(0) == nullptr);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("a reservation whose one-sided writer is late is quarantined until the writer says that it has stopped") {
  SessionKit kit;
  static_cast<void>(kit.reserve(kId, SessionKit::reservation(2)));
  CHECK(kit.session->tick(kit.host.now + 999 * kMs) < INT64_MAX);
  CHECK(kit.count(BlockState::kReserved) == 2);
  CHECK(kit.session->tick(kit.host.now + 1001 * kMs) == INT64_MAX);
  CHECK(kit.count(BlockState::kQuarantined) == 2);
  SUBCASE("by completing") {
    kit.ask(kCompleteVerb, kId, write_body(kit.completion(2)));
    CHECK(kit.refusal() == ErrorCode::kDeadline);
  }
  SUBCASE("by giving up") {
    kit.ask(kAbandonVerb, kId);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
  }
  SUBCASE("by exiting") { kit.session->on_writer_gone(); }
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("a reservation that is placed by the receiver is free at its deadline") {
  SessionKit kit;
  ReserveBody body = SessionKit::reservation(2);
  body.one_sided = false;
  const Addresses blocks = kit.reserve(kId, body);
  SUBCASE("at once") {
    kit.session->tick(kit.host.now + 1001 * kMs);
    CHECK(kit.count(BlockState::kFree) == 16);
    CHECK_FALSE(kit.place(kId, blocks));
  }
  SUBCASE("when what is being placed lies there") {
    const Placement placement = kit.data(kId, blocks);
    REQUIRE(!placement.pieces.empty());
    kit.session->tick(kit.host.now + 1001 * kMs);
    CHECK(kit.count(BlockState::kReserved) == 2);
    kit.session->on_placed(placement.token, true);
    CHECK(kit.count(BlockState::kFree) == 16);
  }
  kit.ask(kCompleteVerb, kId, write_body(kit.completion(2)));
  CHECK(kit.refusal() == ErrorCode::kDeadline);
}

// It used to end after 30 s, whatever the sender had asked for.
TEST_CASE("a reservation lives as long as the sender asks for, and no longer than the receiver's limit") {
  SessionKit kit;
  const std::int64_t most_ms = kit.host.limits_of.reserve_max_ns / kMs;
  CHECK(most_ms == 600'000);
  for (const auto& [asked_ms, granted_ms] : std::vector<std::pair<std::uint64_t, std::int64_t>>{
           {1, 1}, {20'000, 20'000}, {60'000, 60'000}, {599'999, 599'999}, {600'001, most_ms}, {UINT64_MAX, most_ms}}) {
    CAPTURE(asked_ms);
    ReserveBody body = SessionKit::reservation(2);
    body.one_sided = false;
    body.lifetime_ms = asked_ms;
    kit.reserve(kId, body);
    CHECK(kit.host.tick_at == kit.host.now + granted_ms * kMs);
    kit.session->tick(kit.host.now += granted_ms * kMs - 1);
    CHECK(kit.count(BlockState::kReserved) == 2);
    kit.session->tick(++kit.host.now);
    CHECK(kit.count(BlockState::kFree) == 16);
  }
  ReserveBody body = SessionKit::reservation(2);
  body.one_sided = false;
  body.lifetime_ms = 60'000;
  kit.reserve(kId, body);
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "the peer has crashed"));
  CHECK(kit.count(BlockState::kFree) == 16);  // whatever was granted
}

TEST_CASE("a reservation that lives on keeps none that is late from being free, whichever came first") {
  SessionKit kit;
  for (const std::uint64_t lives : {kId, kId + 1, kId + 2}) {
    for (std::uint64_t id = kId; id < kId + 3; ++id) {
      ReserveBody body = SessionKit::reservation(2);
      body.one_sided = false;
      body.lifetime_ms = id == lives ? 60'000 : 1'000;
      kit.reserve(id, body);
    }
    kit.session->tick(kit.host.now + 1001 * kMs);
    CHECK(kit.count(BlockState::kReserved) == 2);
    CHECK(kit.count(BlockState::kFree) == 14);
    kit.ask(kAbandonVerb, lives);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    CHECK(kit.count(BlockState::kFree) == 16);
  }
}

TEST_CASE("nothing is completed before all of it was placed, intact, in the blocks that were reserved") {
  SessionKit kit(/*one_sided=*/false);
  ReserveBody body = SessionKit::reservation(2);
  body.one_sided = false;
  const Addresses blocks = kit.reserve(kId, body);
  const Addresses others = kit.reserve(kId + 1, body);
  const Addresses lent = kit.lend(50, 1);
  CompleteBody completion = kit.completion(2);
  SUBCASE("none") {}
  SUBCASE("half") { CHECK(kit.place(kId, {blocks[0]})); }
  SUBCASE("half, and so it says") {
    CHECK(kit.place(kId, {blocks[0]}));
    completion.bytes /= 2;
  }
  SUBCASE("the other half damaged") {
    CHECK(kit.place(kId, {blocks[0]}));
    CHECK(kit.place(kId, {blocks[1]}, /*intact=*/false));
  }
  SUBCASE("the other half in blocks of another transfer") {
    CHECK(kit.place(kId, {blocks[0]}));
    CHECK_FALSE(kit.place(kId, {others[1]}));
  }
  SUBCASE("the other half in a lent block") {
    CHECK(kit.place(kId, {blocks[0]}));
    CHECK_FALSE(kit.place(kId, lent));
  }
  SUBCASE("all of it") {
    CHECK(kit.place(kId, {blocks[0]}));
    CHECK(kit.place(kId, {blocks[1]}));
    kit.ask(kCompleteVerb, kId, write_body(completion));
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    return;
  }
  kit.ask(kCompleteVerb, kId, write_body(completion));
  CHECK(kit.refusal() == ErrorCode::kProtocol);
  CHECK(kit.received.pop(0) == nullptr);
  CHECK(kit.count(BlockState::kReserved) == 2);  // the other transfer's
}

TEST_CASE("nothing that was sent to lent blocks is completed before all of it was placed, intact, in such blocks") {
  SessionKit kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(50, 2);
  const Addresses own = alloc(*kit.pool, 1);
  CompleteBody completion = kit.completion(2);
  completion.named = lent;
  SUBCASE("none") { CHECK_FALSE(kit.place(kId, own)); }
  SUBCASE("half") { CHECK(kit.place(kId, {lent[0]})); }
  SUBCASE("half, and so it says") {
    CHECK(kit.place(kId, {lent[0]}));
    completion.bytes /= 2;
  }
  SUBCASE("the other half by another transfer") {
    CHECK(kit.place(kId, {lent[0]}));
    CHECK(kit.place(kId + 1, {lent[1]}));
  }
  SUBCASE("the other half damaged") {
    CHECK(kit.place(kId, {lent[0]}));
    CHECK(kit.place(kId, {lent[1]}, /*intact=*/false));
  }
  SUBCASE("all of it, and something for a block that is not lent") {
    CHECK(kit.place(kId, lent));
    CHECK_FALSE(kit.place(kId, own));
  }
  std::optional<Placement> placement;
  SUBCASE("all of it, but for what is being placed") {
    CHECK(kit.place(kId, lent));
    placement = kit.data(kId, {lent[0]});
  }
  SUBCASE("what a transfer that was cancelled had placed, and half") {
    CHECK(kit.place(kId, {lent[0]}));
    kit.ask(kAbandonVerb, kId);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    CHECK(kit.place(kId, {lent[1]}));
  }
  kit.ask(kCompleteVerb, kId, write_body(completion));
  CHECK(kit.refusal() == ErrorCode::kProtocol);
  if (placement) kit.session->on_placed(placement->token, true);
  CHECK(kit.received.pop(0) == nullptr);
  CHECK(kit.count(BlockState::kLent) == 2);
  // The same number once more: nothing is left of what went wrong.
  completion.bytes = kit.bytes_of(2);
  CHECK(kit.place(kId, {lent[0]}));
  CHECK(kit.place(kId, {lent[1]}));
  kit.ask(kCompleteVerb, kId, write_body(completion));
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(kit.received.pop(0)->lent);
}

TEST_CASE("what a peer has written by itself is not counted here, what was dropped is") {
  SessionKit kit(/*one_sided=*/true);
  const Addresses lent = kit.lend(50, 1);
  CompleteBody completion = kit.completion(1);
  completion.named = lent;
  kit.ask(kCompleteVerb, kId, write_body(completion));
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK_FALSE(kit.place(kId + 1, alloc(*kit.pool, 1)));
  kit.ask(kCompleteVerb, kId + 1, write_body(completion));
  CHECK(kit.refusal() == ErrorCode::kProtocol);
}

TEST_CASE("nothing is completed while a payload is being placed in its blocks, for whatever transfer") {
  SessionKit kit;
  const Addresses lent = kit.lend(50, 2);
  CHECK(kit.place(kId, lent));
  CompleteBody completion = kit.completion(2);
  completion.named = lent;
  SUBCASE("it is told") {}
  SUBCASE("it is inserted") {
    completion.insert = true;
    completion.tokens.assign(2 * kit.pool->layout().block_tokens, 3);
  }
  const Placement placement = kit.data(kId + 1, {lent[1]});
  REQUIRE(!placement.pieces.empty());
  kit.ask(kCompleteVerb, kId, write_body(completion));
  CHECK(kit.refusal() == ErrorCode::kProtocol);
  CHECK(kit.count(BlockState::kLent) == 2);
  kit.session->on_placed(placement.token, true);
  kit.ask(kReturnVerb, 60, write_addresses(lent));
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("a reservation is not completed while a payload is being placed in it, and free behind it") {
  SessionKit kit(/*one_sided=*/false);
  ReserveBody body = SessionKit::reservation(2);
  body.one_sided = false;
  const Addresses blocks = kit.reserve(kId, body);
  CHECK(kit.place(kId, blocks));
  const Placement again = kit.data(kId, {blocks[0]});  // behind all that was needed
  REQUIRE(!again.pieces.empty());
  kit.ask(kCompleteVerb, kId, write_body(kit.completion(2)));
  CHECK(kit.refusal() == ErrorCode::kProtocol);
  CHECK(kit.count(BlockState::kReserved) == 2);
  kit.session->on_placed(again.token, true);
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("a number that is used again does not end what is being placed for its second transfer") {
  SessionKit kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(50, 1);
  const Placement first = kit.data(kId, lent);
  kit.ask(kAbandonVerb, kId);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  ReserveBody body = SessionKit::reservation(1);
  body.one_sided = false;
  const Placement second = kit.data(kId, kit.reserve(kId, body));
  REQUIRE(!second.pieces.empty());
  CHECK(first.token != second.token);
  kit.session->on_placed(first.token, true);
  SUBCASE("it is still placed at its deadline") {
    kit.session->tick(kit.host.now + 1001 * kMs);
    CHECK(kit.count(BlockState::kReserved) == 1);
    kit.session->on_placed(second.token, true);
    CHECK(kit.count(BlockState::kReserved) == 0);
  }
  SUBCASE("it is complete when its own content is") {
    kit.session->on_placed(second.token, true);
    kit.ask(kCompleteVerb, kId, write_body(kit.completion(1)));
    CHECK(kit.answer().kind == FrameKind::kAnswer);
  }
}

TEST_CASE("a number under which lent blocks are written is no reservation's") {
  SessionKit kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(50, 1);
  CHECK(kit.place(kId, lent));
  kit.ask(kReserveVerb, kId, write_body(SessionKit::reservation(1)));
  CHECK(kit.refusal() == ErrorCode::kProtocol);
  kit.ask(kAbandonVerb, kId);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  kit.ask(kReserveVerb, kId, write_body(SessionKit::reservation(1)));
  CHECK(kit.answer().kind == FrameKind::kAnswer);
}

TEST_CASE("a peer that begins transfers to lent blocks without end is left") {
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

TEST_CASE("data for blocks that are not the peer's is dropped") {
  SessionKit kit(/*one_sided=*/false);
  const Addresses own = alloc(*kit.pool, 1);
  const Addresses lent = kit.lend(50, 2);
  CHECK_FALSE(kit.place(kId, own));
  CHECK(kit.place(kId, lent));
  kit.ask(kReturnVerb, 51, write_addresses({&lent[0], 1}));
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK_FALSE(kit.place(kId, lent));
  CHECK(kit.place(kId, {lent[1]}));
}

TEST_CASE("a block that goes to the index is no longer written") {
  SessionKit kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(50, 1);
  CompleteBody body = kit.completion(1);
  body.named = lent;
  body.insert = true;
  body.tokens = prompt(1, 1);
  body.has_checksum = true;
  body.checksum = kit.peer_blocks.checksum(lent);
  kit.ask(kCompleteVerb, kId, write_body(body));
  CHECK_FALSE(kit.place(kId, lent));  // the checksum is still being computed
  CHECK_FALSE(kit.place(kId + (std::uint64_t{1} << 31), lent));
  kit.ask(kReturnVerb, 51, write_addresses(lent));
  CHECK(kit.refusal() == ErrorCode::kNotOwner);
  kit.host.run_works();
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(kit.count(BlockState::kHistorical) == 1);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("a wrong checksum is found, and the blocks are as they were before the transfer") {
  SessionKit kit;
  const Addresses blocks = kit.reserve(kId, SessionKit::reservation(2));
  const Addresses lent = kit.lend(50, 1);
  CompleteBody body = kit.completion(2);
  body.has_checksum = true;
  body.checksum = kit.peer_blocks.checksum(blocks) + 1;
  kit.ask(kCompleteVerb, kId, write_body(body));
  CHECK(kit.link->sent.empty());
  kit.host.run_works();
  CHECK(kit.refusal() == ErrorCode::kProtocol);
  body.named = lent;
  body.insert = true;
  body.tokens = prompt(1, 1);
  kit.ask(kCompleteVerb, kId + 1, write_body(body));
  kit.host.run_works();
  CHECK(kit.refusal() == ErrorCode::kProtocol);
  CHECK(kit.count(BlockState::kLent) == 1);
  CHECK(kit.count(BlockState::kFree) == 15);
  CHECK(kit.session->counts().promised == 1);
}

TEST_CASE("a peer that goes while its blocks are verified leaves nothing behind") {
  SessionKit kit;
  const Addresses lent = kit.lend(50, 2);
  CompleteBody body = kit.completion(1);
  body.named = {lent[0]};
  body.insert = true;
  body.tokens = prompt(1, 1);
  body.has_checksum = true;
  body.checksum = kit.peer_blocks.checksum(body.named);
  SUBCASE("and they are intact") {}
  SUBCASE("and they are not") { ++body.checksum; }
  kit.ask(kCompleteVerb, kId, write_body(body));
  kit.link->closed = true;
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
  CHECK(kit.count(BlockState::kQuarantined) == 1);
  kit.host.run_works();
  kit.session->on_writer_gone();
  CHECK(kit.count(BlockState::kLent) + kit.count(BlockState::kQuarantined) == 0);
  CHECK(kit.session->counts().promised == 0);
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
  // What is quarantined for it counts, too.
  kit.session->tick(kit.host.now + 1001 * kMs);
  kit.ask(kReserveVerb, 6, write_body(SessionKit::reservation(1)));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  kit.ask(kAbandonVerb, 1);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  static_cast<void>(kit.reserve(7, SessionKit::reservation(3)));
}

TEST_CASE("what a peer's requests take of memory is limited, however few they are") {
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
  SUBCASE("a transfer that is cancelled makes room") {
    kit.ask(kAbandonVerb, 1);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
  }
  SUBCASE("a transfer that is complete makes room") {
    kit.ask(kCompleteVerb, 1, write_body(kit.completion(2)));
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    kit.pool->unpin(&kit.received.pop(0)->pin, 1);
  }
  SUBCASE("a transfer that is too late makes room") { kit.session->tick(kit.host.now + 1001 * kMs); }
  kit.host.now += 1001 * kMs;
  static_cast<void>(kit.reserve(4, insertion(4)));
}

TEST_CASE("a reservation that is refused, or has no blocks yet and is given up, takes no memory") {
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

TEST_CASE("what waits to be verified is limited, and what is refused leaves nothing") {
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

TEST_CASE("a peer that has too much waiting behind content on its way is left") {
  // Content that never arrives.
  struct Stalled final : RouteReceiver {
    void begin(Admit, Placed, Lost) override {}
    void on_message(Message&&) override {}
    bool defer(std::function<void()>& work) override {
      works.push_back(std::move(work));
      return true;
    }
    void close(std::function<void()> on_closed) noexcept override { on_closed(); }
    std::vector<std::function<void()>> works;
  };
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
  for (const auto& work : std::exchange(stalled->works, {})) work();  // it has arrived after all
  kit.link->sent.clear();
  CHECK_FALSE(code_of(say));
  stalled->works.clear();  // they keep the session
  session->on_closed(Error(ErrorCode::kPeerLost, "the test ends"));
}

TEST_CASE("numbers that are no transfer's are refused") {
  SessionKit kit;
  for (const std::uint64_t id : {std::uint64_t{0}, kFetchBit | kId}) {
    kit.ask(kReserveVerb, id, write_body(SessionKit::reservation(1)));
    CHECK(kit.refusal() == ErrorCode::kProtocol);
    kit.ask(kCompleteVerb, id, write_body(kit.completion(1)));
    CHECK(kit.refusal() == ErrorCode::kProtocol);
  }
  static_cast<void>(kit.reserve(kId, SessionKit::reservation(1)));
  kit.ask(kReserveVerb, kId, write_body(SessionKit::reservation(1)));
  CHECK(kit.refusal() == ErrorCode::kProtocol);
  kit.ask(kAbandonVerb, 77);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(kit.session->counts().promised == 1);
}

TEST_CASE("the cached prefix of an insertion is held, and not sent again") {
  SessionKit kit;
  const Addresses cached = alloc(*kit.pool, 2);
  static_cast<void>(insert(kit.pool, prompt(1, 2), cached));
  ReserveBody body = SessionKit::reservation(3);
  body.insert = true;
  body.tokens = prompt(1, 3);
  kit.ask(kReserveVerb, kId, write_body(body));
  const ReservedBody reserved = read_reserved(kit.answer().body);
  CHECK(reserved.held == 2);
  REQUIRE(reserved.addresses.size() == 1);
  CHECK(kit.pool->evict(4, kMixed) == 0);  // held
  CompleteBody completion = kit.completion(1);
  SUBCASE("completed") {
    kit.ask(kCompleteVerb, kId, write_body(completion));
    const Addresses canonical = read_addresses(kit.answer().body);
    CHECK(canonical == Addresses{cached[0], cached[1], reserved.addresses[0]});
    const auto item = kit.received.pop(0);
    REQUIRE(item != nullptr);
    CHECK(item->inserted);
    CHECK(kit.pool->evict(4, kMixed) == 0);  // the application's
    kit.pool->unpin(&item->pin, 1);
    CHECK(kit.pool->evict(4, kMixed) == 3);
  }
  SUBCASE("given up") {
    kit.ask(kAbandonVerb, kId);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    CHECK(kit.pool->evict(4, kMixed) == 2);
  }
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("pages that came in another way meanwhile are not kept twice") {
  SessionKit kit;
  ReserveBody body = SessionKit::reservation(2);
  body.insert = true;
  body.tokens = prompt(1, 2);
  static_cast<void>(kit.reserve(kId, body));
  const Addresses first = alloc(*kit.pool, 1);
  static_cast<void>(insert(kit.pool, prompt(1, 1), first));
  CompleteBody completion = kit.completion(2);
  completion.has_private = false;
  completion.private_bytes.clear();
  kit.ask(kCompleteVerb, kId, write_body(completion));
  CHECK(read_addresses(kit.answer().body).at(0) == first[0]);
  CHECK(kit.count(BlockState::kHistorical) == 2);
  CHECK(kit.count(BlockState::kFree) == 14);
  CHECK(kit.pool->evict(4, kMixed) == 2);  // the application was not told: nothing is pinned
}

TEST_CASE("an application that is behind makes its peers wait, and nothing is lost") {
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

TEST_CASE("what is cancelled before it has blocks never gets them") {
  SessionKit kit(/*one_sided=*/true, /*hbm_blocks=*/2);
  const Addresses cached = alloc(*kit.pool, 2);
  static_cast<void>(insert(kit.pool, prompt(1, 2), cached));
  ReserveBody body = SessionKit::reservation(2);
  body.may_evict = true;
  kit.ask(kReserveVerb, kId, write_body(body));
  CHECK(kit.link->sent.empty());  // room is being made
  SUBCASE("by the peer") {
    kit.ask(kAbandonVerb, kId);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    kit.host.run_works();
    CHECK(kit.refusal() == ErrorCode::kCancelled);
  }
  SUBCASE("by the end of the link") {
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    kit.link->closed = true;
    kit.host.run_works();
  }
  CHECK(kit.count(BlockState::kReserved) == 0);
  CHECK(kit.count(BlockState::kFree) == 2);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("a pool that is closing is lost to its peers: they are not told that theirs is closed") {
  SessionKit kit;
  static_cast<void>(kit.reserve(kId, SessionKit::reservation(2)));
  kit.received.close();
  kit.ask(kCompleteVerb, kId, write_body(kit.completion(2)));
  CHECK(kit.refusal() == ErrorCode::kPeerLost);
  CHECK(kit.count(BlockState::kFree) == 16);
  kit.pool->close();
  kit.ask(kReserveVerb, kId + 1, write_body(SessionKit::reservation(1)));
  CHECK(kit.refusal() == ErrorCode::kPeerLost);
}

TEST_CASE("an answer that cannot be sent ends the link") {
  SessionKit kit;
  kit.link->busy = true;
  kit.ask(kReserveVerb, kId, write_body(SessionKit::reservation(1)));
  CHECK(kit.link->closed);
  CHECK(kit.link->why == ErrorCode::kBusy);
}

TEST_CASE("a return of what is not lent changes nothing") {
  SessionKit kit;
  Addresses lent = kit.lend(50, 3);
  for (const Addresses& wrong : {Addresses{lent[0], lent[1], lent[0]}, Addresses{lent[0], 1234}}) {
    kit.ask(kReturnVerb, 51, write_addresses(wrong));
    CHECK(kit.refusal() == ErrorCode::kNotOwner);
    CHECK(kit.session->counts().lent == 3);
  }
  kit.ask(kReturnVerb, 52, write_addresses(lent));
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("a return that names a block which was never lent gives the others back, and does not speak of a recall") {
  SessionKit kit;
  const Addresses lent = kit.lend(50, 2);
  const Address never = alloc(*kit.pool, 1)[0];
  kit.ask(kReturnVerb, 51, write_addresses(Addresses{lent[0], never, lent[1]}));
  const Message refused = kit.answer();
  REQUIRE(refused.kind == FrameKind::kRefused);
  const Error why = read_error(refused.body);
  CHECK(why.code() == ErrorCode::kNotOwner);
  CHECK(std::string(why.what()).starts_with("1 of the 3 blocks are not lent to you any more, or never were"));
  CHECK(kit.session->counts().lent == 0);
  CHECK(kit.session->counts().promised == 0);
  CHECK(kit.count(BlockState::kActive) == 1);
  CHECK(kit.count(BlockState::kFree) == 15);
}

}  // namespace
}  // namespace kvpool::testing
