// Blocks that a peer lends, and writes to them, against a peer that follows a script.
#include <doctest/doctest.h>

#include "outgoing_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

using outgoing::request_for;

TEST_CASE("a caller may give up waiting for a peer, and blocks that are lent too late are returned") {
  SessionKit kit;
  int asked = 0;
  kit.link->meanwhile = [&](std::int64_t until_ns) { kit.host.now = until_ns; };
  const Waiting waiting(kit.host.now + 1000 * kMs, [&] { return ++asked == 3; });
  CHECK(code_of([&] { kit.session->borrow(2, Medium::kHbm, true, waiting); }) == ErrorCode::kCancelled);
  CHECK(asked == 3);
  kit.link->meanwhile = nullptr;
  REQUIRE(kit.link->sent.size() == 2);
  const Message ask = kit.link->sent[0];
  CHECK(kit.link->sent[1].kind == FrameKind::kCancel);
  CHECK(kit.link->sent[1].verb == kLendVerb.number);
  CHECK(kit.link->sent[1].id == ask.id);
  kit.link->sent.clear();
  kit.reply(kLendVerb, ask.id, write_addresses(SessionKit::peer_addresses(2)));
  CHECK(kit.link->take().verb == kReturnVerb.number);
}

TEST_CASE("the number of requests to one peer is limited") {
  SessionKit kit;
  kit.host.limits_of.transfers_max = 1;
  const auto transfer = kit.session->transfer(request_for(kit, 1));
  TransferRequest second = request_for(kit, 1);
  const Addresses from = second.from;
  CHECK(code_of([&] { kit.session->transfer(std::move(second)); }) == ErrorCode::kBusy);
  kit.pool->free(from.data(), from.size());
  CHECK(kit.count(BlockState::kFree) == 15);
}

TEST_CASE("named destinations are written by one transfer at a time, and not returned meanwhile") {
  SessionKit kit;
  const Addresses borrowed = kit.borrow(2);
  TransferRequest request = request_for(kit, 2);
  request.to = borrowed;
  request.private_bytes.reset();
  const auto transfer = kit.session->transfer(std::move(request));
  CHECK(kit.link->sent.empty());
  TransferRequest second = request_for(kit, 1);
  second.to = {borrowed[1]};
  CHECK(code_of([&] { kit.session->transfer(std::move(second)); }) == ErrorCode::kState);
  CHECK(code_of([&] { kit.session->give_back(borrowed, kit.host.now + kMs); }) == ErrorCode::kState);
  kit.host.end_write();
  CHECK(transfer->done());
  CHECK(kit.link->sent.empty());  // no one needed to be told
  kit.link->meanwhile = [&](std::int64_t) { kit.reply_next(kReturnVerb); };
  kit.session->give_back(borrowed, kit.host.now + kMs);
  CHECK(kit.session->borrowed_blocks() == 0);
}

TEST_CASE("a write to named destinations that ends before it begins ends once, and writes nothing") {
  SessionKit kit;
  const Addresses borrowed = kit.borrow(2);
  TransferRequest request = request_for(kit, 2);  // its private bytes are for the peer, which answers in the end
  request.to = borrowed;
  const Addresses from = request.from;
  bool lost = false;
  SUBCASE("at its deadline") {
    kit.host.when_asked_to_tick = [&] { kit.session->tick(kit.host.now += 101 * kMs); };
  }
  SUBCASE("with the link") {
    lost = true;
    kit.host.when_asked_to_tick = [&] { kit.session->on_closed(Error(ErrorCode::kPeerLost, "the test says so")); };
  }
  const auto transfer = kit.session->transfer(std::move(request));
  CHECK(failure(*transfer) == (lost ? ErrorCode::kPeerLost : ErrorCode::kDeadline));
  CHECK(kit.host.writes.empty());
  kit.pool->free(from.data(), from.size());
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("after a late insertion the receiver's answer decides who owns the destinations") {
  SessionKit kit;
  const Addresses borrowed = kit.borrow(1);
  TransferRequest request = request_for(kit, 1);
  request.to = borrowed;
  request.insert = true;
  request.tokens = prompt(1, 1);
  const auto transfer = kit.session->transfer(std::move(request));
  kit.host.end_write();
  const std::uint64_t id = kit.link->take().id;
  kit.session->tick(kit.host.now += 101 * kMs);
  CHECK(failure(*transfer) == ErrorCode::kDeadline);
  CHECK(kit.link->take().verb == kAbandonVerb.number);
  const auto write_again = [&] {
    TransferRequest again = request_for(kit, 1);
    again.to = borrowed;
    again.private_bytes.reset();
    return kit.session->transfer(std::move(again));
  };
  CHECK(code_of([&] { write_again(); }) == ErrorCode::kState);
  kit.reply(kAbandonVerb, id);  // says nothing
  CHECK(code_of([&] { write_again(); }) == ErrorCode::kState);
  SUBCASE("inserted") {
    kit.reply(kCompleteVerb, id, write_addresses(borrowed));
    CHECK(code_of([&] { write_again(); }) == ErrorCode::kNotOwner);
    CHECK(kit.session->borrowed_blocks() == 0);
  }
  SUBCASE("refused") {
    kit.refuse(kCompleteVerb, id, Error(ErrorCode::kBusy, "behind"));
    CHECK(write_again() != nullptr);
  }
}

// Data that is still on the link when its transfer ends arrives later than writes that bypass the link.
TEST_CASE("on the way to lent blocks nothing overtakes the data of a transfer that was given up") {
  SessionKit kit(/*one_sided=*/false);
  const Addresses borrowed = kit.borrow(1);
  const auto write = [&] {
    TransferRequest request = request_for(kit, 1);
    request.to = borrowed;
    return kit.session->transfer(std::move(request));
  };
  const auto transfer = write();
  std::uint64_t id = 0;
  SUBCASE("too late within a frame") {
    kit.host.now += 101 * kMs;
    const Error late(ErrorCode::kDeadline, "the peer did not take the data by the deadline");
    kit.host.end_write(&late);
    id = kit.link->take().id;
  }
  SUBCASE("too late for the confirmation") {
    kit.host.end_write();
    kit.link->sent.clear();
    kit.session->tick(kit.host.now += 101 * kMs);
    id = kit.link->take().id;
  }
  SUBCASE("cancelled, and too late for the answer to that") {
    transfer->cancel();
    const Error cancelled(ErrorCode::kCancelled, "cancelled before the data was sent");
    kit.host.end_write(&cancelled);
    id = kit.link->take().id;
    CHECK_FALSE(transfer->done());
    kit.session->tick(kit.host.now += 101 * kMs);
  }
  REQUIRE(transfer->done());
  const auto past = std::make_shared<ScriptRoute>(/*one_sided=*/true);
  kit.session->start(kit.link, {past});
  TransferRequest refused = request_for(kit, 1);
  const Addresses from = refused.from;
  refused.to = borrowed;
  CHECK(code_of([&] { kit.session->transfer(std::move(refused)); }) == ErrorCode::kBusy);
  const std::uint32_t free = kit.count(BlockState::kFree);
  kit.pool->free(from.data(), from.size());
  CHECK(kit.count(BlockState::kFree) == free + 1);  // no one reads them
  kit.session->start(kit.link, {kit.route});
  const auto behind = write();  // by the link: it comes behind
  kit.host.end_write();
  kit.reply_next(kCompleteVerb, write_addresses({}));
  CHECK_NOTHROW(behind->rethrow_if_failed());
  kit.session->start(kit.link, {past});
  CHECK(code_of([&] { write(); }) == ErrorCode::kBusy);
  kit.reply(kAbandonVerb, id);
  CHECK_NOTHROW(write());
}

TEST_CASE("a loan that comes too late is returned") {
  SessionKit kit;
  kit.link->meanwhile = [&](std::int64_t deadline_ns) { kit.host.now = deadline_ns; };
  CHECK(code_of([&] { kit.session->borrow(2, Medium::kHbm, true, kit.host.now + kMs); }) == ErrorCode::kDeadline);
  const std::uint64_t id = kit.link->sent.at(0).id;
  kit.link->sent.clear();  // the call, and that no one waits for it any more
  kit.reply(kLendVerb, id, write_addresses(SessionKit::peer_addresses(2)));
  const Message back = kit.link->take();
  CHECK(back.verb == kReturnVerb.number);
  CHECK(read_addresses(back.body) == SessionKit::peer_addresses(2));
  CHECK(kit.session->borrowed_blocks() == 0);
}

TEST_CASE("a return that could not be sent has changed nothing") {
  SessionKit kit;
  const Addresses borrowed = kit.borrow(2);
  kit.link->busy = true;
  CHECK(code_of([&] { kit.session->give_back(borrowed, kit.host.now + kMs); }) == ErrorCode::kBusy);
  CHECK(kit.session->borrowed_blocks() == 2);
  kit.link->busy = false;
  kit.link->meanwhile = [&](std::int64_t) { kit.reply_next(kReturnVerb); };
  kit.session->give_back(borrowed, kit.host.now + kMs);
  CHECK(kit.session->borrowed_blocks() == 0);
}

// It used to be taken for a block that was lent twice, and the link was closed.
TEST_CASE("a block may be lent again before the thread that returns it has noticed") {
  SessionKit kit;
  const Addresses borrowed = kit.borrow(1);
  Addresses again;
  kit.link->at_once = [&] {
    kit.reply_next(kReturnVerb);
    kit.link->meanwhile = [&](std::int64_t) { kit.reply_next(kLendVerb, write_addresses(borrowed)); };
    again = kit.session->borrow(1, Medium::kHbm, true, kit.host.now + kMs);  // as another thread may
  };
  kit.session->give_back(borrowed, kit.host.now + kMs);
  CHECK(again == borrowed);
  CHECK_FALSE(kit.link->closed);
  CHECK(kit.session->borrowed_blocks() == 1);
}

TEST_CASE("a peer that lends blocks that it does not have, or too many or too few, is disconnected") {
  SessionKit kit;
  Addresses lent = SessionKit::peer_addresses(2);
  SUBCASE("twice the same") { lent[1] = lent[0]; }
  SUBCASE("one too many") { lent.push_back(lent[0] + 1); }
  SUBCASE("a block that is not there") { lent[1] = make_address(kPeerInstance, Medium::kHbm, 1, kPeerBlocks); }
  SUBCASE("another peer's") { lent[1] = make_address(kPeerInstance + 1, Medium::kHbm, 1, 1); }
  kit.link->meanwhile = [&](std::int64_t) { kit.reply_next(kLendVerb, write_addresses(lent)); };
  CHECK(code_of([&] { kit.session->borrow(2, Medium::kHbm, true, kit.host.now + kMs); }) == ErrorCode::kProtocol);
  CHECK(kit.link->closed);
  CHECK(kit.session->borrowed_blocks() == 0);
}

}  // namespace
}  // namespace kvpool::testing
