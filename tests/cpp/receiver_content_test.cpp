// The content of transfers at the receiving half of the protocol: a transfer completes only when all of it is in place.
#include <doctest/doctest.h>

#include <optional>

#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kId = 5;

TEST_CASE("a reservation is completed only when all of its content was placed, intact, in its blocks") {
  SessionKit kit(/*one_sided=*/false);
  ReserveBody body = SessionKit::reservation(2);
  body.one_sided = false;
  const Addresses blocks = kit.reserve(kId, body);
  const Addresses others = kit.reserve(kId + 1, body);
  const Addresses lent = kit.lend(50, 1);
  CompleteBody completion = kit.completion(2);
  SUBCASE("none") {}
  SUBCASE("half") { CHECK(kit.place(kId, {blocks[0]})); }
  SUBCASE("half, and reported as half") {
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

TEST_CASE("a transfer to lent blocks is completed only when all of its content was placed, intact, in such blocks") {
  SessionKit kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(50, 2);
  const Addresses own = alloc(*kit.pool, 1);
  CompleteBody completion = kit.completion(2);
  completion.named = lent;
  SUBCASE("none") { CHECK_FALSE(kit.place(kId, own)); }
  SUBCASE("half") { CHECK(kit.place(kId, {lent[0]})); }
  SUBCASE("half, and reported as half") {
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
  SUBCASE("all of it, except what is being placed") {
    CHECK(kit.place(kId, lent));
    placement = kit.data(kId, {lent[0]});
  }
  SUBCASE("half, beside what a cancelled transfer had placed") {
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
  // The same number once more: the failed one has left nothing.
  completion.bytes = kit.bytes_of(2);
  CHECK(kit.place(kId, {lent[0]}));
  CHECK(kit.place(kId, {lent[1]}));
  kit.ask(kCompleteVerb, kId, write_body(completion));
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(kit.received.pop(0)->lent);
}

TEST_CASE("content that a peer writes by itself is not counted here, and dropped content is") {
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

TEST_CASE("no transfer is completed while a payload of any transfer is being placed in its blocks") {
  SessionKit kit;
  const Addresses lent = kit.lend(50, 2);
  CHECK(kit.place(kId, lent));
  CompleteBody completion = kit.completion(2);
  completion.named = lent;
  SUBCASE("it is informed") {}
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

TEST_CASE("a reservation is not completed while a payload is being placed in it, and is free afterwards") {
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

TEST_CASE("reusing a transfer's number does not end what is being placed for the second transfer") {
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

TEST_CASE("a number under which lent blocks are written is not that of a reservation") {
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

TEST_CASE("data for blocks that do not belong to the peer is dropped") {
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

TEST_CASE("a block that moves to the index can no longer be written") {
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

// A recall, or a checksum, may look at a lent block while data of another transfer would be written into it.
TEST_CASE("data under the id of a reservation or a fetch is never placed in a lent block") {
  SessionKit kit(/*one_sided=*/false);
  ReserveBody reserve = SessionKit::reservation(1);
  reserve.one_sided = false;
  const Addresses reserved = kit.reserve(kId, reserve);
  const Addresses lent = kit.lend(50, 1);
  const Addresses older = {without_instance(lent[0])};
  CHECK(kit.place(kId, {without_instance(reserved[0])}));  // its own, by either address
  const auto refused = [&] {
    for (const Addresses& name : {lent, older}) {
      CHECK_FALSE(kit.place(kId, name));
      CHECK_FALSE(kit.place(kId, {reserved[0], name[0]}));
      CHECK_FALSE(kit.place(kFetchBit | kId, name));
    }
  };
  SUBCASE("its peer holds it") { refused(); }
  SUBCASE("it goes to the index, and its checksum is being looked at") {
    CompleteBody body = kit.completion(1);
    body.named = lent;
    body.insert = true;
    body.tokens = prompt(1, 1);
    body.has_checksum = true;
    body.checksum = kit.peer_blocks.checksum(lent);
    kit.ask(kCompleteVerb, kId + 1, write_body(body));
    refused();
    SUBCASE("and is recalled meanwhile") {
      kit.link->meanwhile = [&](std::int64_t deadline_ns) { kit.host.now = deadline_ns; };
      CHECK(kit.session->recall(lent, kit.host.now + kMs).returned == 1);
      kit.link->meanwhile = nullptr;
      refused();
    }
    kit.link->sent.clear();
    kit.host.run_works();
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    CHECK(kit.count(BlockState::kHistorical) == 1);
    refused();
  }
}

TEST_CASE("data for a lent block must name it by the address by which it was lent") {
  SessionKit kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(50, 1);
  CHECK(instance_of(lent[0]) == kOwnInstance);
  CHECK_FALSE(kit.place(kId, {without_instance(lent[0])}));
  CHECK(kit.place(kId + 1, lent));
}

TEST_CASE("a wrong checksum is detected, and the blocks are as they were before the transfer") {
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

TEST_CASE("a peer that disconnects while its blocks are verified leaves nothing behind") {
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

}  // namespace
}  // namespace kvpool::testing
