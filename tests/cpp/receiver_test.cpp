// The receiving half of the protocol, against a peer that follows a script: reservations, insertions and returns.
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include "session_kit.h"

namespace kvpool::testing {
namespace {

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

TEST_CASE("a reservation with a late one-sided writer is quarantined until the writer says that it has stopped") {
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

TEST_CASE("a reservation that the receiver itself writes is free at its deadline") {
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

TEST_CASE("a reservation that lives on does not delay the expiry of others, whichever came first") {
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

TEST_CASE("numbers that belong to no transfer are refused") {
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

TEST_CASE("pages that arrived in another way meanwhile are not kept twice") {
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

TEST_CASE("a transfer that is cancelled before it has blocks never gets any") {
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

TEST_CASE("to its peers a closing pool is a lost peer; they are not told that their own pool is closed") {
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

TEST_CASE("returning blocks that are not lent changes nothing") {
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

TEST_CASE("a return that names a block never lent gives the others back, and does not mention a recall") {
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
