// Fetches of this side, against an owner that follows a script. Those that a peer asks for: fetch_served_test.cpp.
#include "kvpool/transfer/fetch.h"

#include <doctest/doctest.h>

#include "failing_alloc.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

FetchRequest fetch_for(SessionKit& kit, std::size_t n) {
  FetchRequest request;
  request.peer = "peer";
  request.from = SessionKit::peer_addresses(n);
  request.to = alloc(*kit.pool, n);
  request.deadline_ns = kit.host.now + 100 * kMs;
  return request;
}

TEST_CASE("a fetch reports its duration, and what the owner says of the writing") {
  SessionKit kit;
  const auto fetch = kit.session->fetch(fetch_for(kit, 2), /*frees_on_failure=*/false);
  CHECK(fetch->bytes_total() == kit.bytes_of(2));
  kit.host.now += 5 * kMs;
  kit.reply_next(kFetchVerb, fetched());
  CHECK(fetch->stats().write_us == doctest::Approx(2000));
  CHECK(fetch->stats().total_us == doctest::Approx(5000));
  CHECK(fetch->stats().calls == 3);
  CHECK(fetch->stats().route == "script");
  CHECK(kit.session->counts().received_bytes == kit.bytes_of(2));
}

TEST_CASE("a fetch with a checksum ends when the content has been compared, and fails if it differs") {
  SessionKit kit;
  FetchRequest request = fetch_for(kit, 2);
  request.checksum = true;
  request.route = "script";
  const auto fetch = kit.session->fetch(request, /*frees_on_failure=*/true);
  const Message call = kit.take(kFetchVerb);
  const FetchBody asked = read_fetch(call.body);
  CHECK(asked.checksum);
  CHECK(asked.route == "script");
  const std::uint32_t right = kit.peer_blocks.checksum(request.to);
  SUBCASE("the same") {
    kit.reply(kFetchVerb, call.id, fetched(right));
    CHECK_FALSE(fetch->done());
    kit.host.run_works();
    CHECK_NOTHROW(fetch->rethrow_if_failed());
    CHECK(fetch->done());
    CHECK(kit.count(BlockState::kActive) == 2);
  }
  SUBCASE("another") {
    kit.reply(kFetchVerb, call.id, fetched(right ^ 1U));
    kit.host.run_works();
    CHECK(failure(*fetch) == ErrorCode::kProtocol);
    CHECK(kit.count(BlockState::kFree) == 16);
    CHECK_FALSE(kit.link->closed);
  }
  SUBCASE("none, or one that nobody asked for, ends the link") {
    CHECK(code_of([&] { kit.reply(kFetchVerb, call.id, fetched()); }) == ErrorCode::kProtocol);
    kit.session->on_closed(Error(ErrorCode::kProtocol, "nonsense"));
    CHECK(failure(*fetch) == ErrorCode::kPeerLost);
  }
  SUBCASE("a second answer while it is compared ends the link, and the first counts") {
    kit.reply(kFetchVerb, call.id, fetched(right));
    CHECK(code_of([&] { kit.reply(kFetchVerb, call.id, fetched(right)); }) == ErrorCode::kProtocol);
    kit.host.run_works();
    CHECK_NOTHROW(fetch->rethrow_if_failed());
  }
  SUBCASE("what ends it meanwhile waits until the content is no longer read") {
    kit.reply(kFetchVerb, call.id, fetched(right));
    ErrorCode why = ErrorCode::kCancelled;
    SUBCASE("cancelled") { CHECK(fetch->cancel()); }
    SUBCASE("too late") {
      why = ErrorCode::kDeadline;
      kit.session->tick(kit.host.now += 101 * kMs);
    }
    SUBCASE("lost") {
      why = ErrorCode::kPeerLost;
      kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    }
    CHECK_FALSE(fetch->done());
    CHECK(kit.count(BlockState::kReserved) == 2);
    kit.host.run_works();
    CHECK(failure(*fetch) == why);
    CHECK(kit.link->sent.empty());
    CHECK(kit.count(BlockState::kFree) == 16);
  }
}

TEST_CASE(
    "the destinations of a fetch that could not be asked for are free for the caller at once, also while another "
    "thread has the fetch") {
  SessionKit kit;
  const FetchRequest request = fetch_for(kit, 2);
  const auto fetch = std::make_shared<Fetch>(kit.session, kFetchBit | 9, request, /*frees_on_failure=*/true);
  kit.link->closed = true;
  CHECK(code_of([&] { fetch->start(); }) == ErrorCode::kPeerLost);
  CHECK(kit.count(BlockState::kActive) == 2);
  kit.pool->free(request.to.data(), request.to.size());
}

TEST_CASE("the destinations of a fetch return to the caller only when the owner has stopped writing") {
  SessionKit kit;
  const FetchRequest request = fetch_for(kit, 2);
  const auto fetch = kit.session->fetch(request, /*frees_on_failure=*/false);
  const std::uint64_t id = kit.link->take().id;
  CHECK(kit.count(BlockState::kReserved) == 2);
  SUBCASE("done") {
    kit.reply(kFetchVerb, id, fetched());
    CHECK_NOTHROW(fetch->rethrow_if_failed());
    CHECK(kit.count(BlockState::kActive) == 2);
  }
  SUBCASE("refused") {
    kit.refuse(kFetchVerb, id, Error(ErrorCode::kStaleAddress, "freed"));
    CHECK(failure(*fetch) == ErrorCode::kStaleAddress);
    CHECK(kit.count(BlockState::kActive) == 2);
  }
  SUBCASE("cancelled") {
    CHECK(fetch->cancel());
    CHECK(fetch->cancel());  // as before: it is being cancelled
    CHECK(kit.link->take().kind == FrameKind::kCancel);
    CHECK_FALSE(fetch->done());
    kit.refuse(kFetchVerb, id, Error(ErrorCode::kCancelled, "stopped"));
    CHECK(failure(*fetch) == ErrorCode::kCancelled);
    CHECK(kit.count(BlockState::kActive) == 2);
  }
  SUBCASE("too late") {
    kit.session->tick(kit.host.now += 101 * kMs);
    CHECK(failure(*fetch) == ErrorCode::kDeadline);
    CHECK(kit.link->take().kind == FrameKind::kCancel);
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    // The peer cancels a fetch that it began. Its number is that of our fetch.
    kit.cancel(kFetchVerb, id);
    CHECK(kit.link->sent.empty());
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    kit.refuse(kFetchVerb, id, Error(ErrorCode::kCancelled, "stopped"));
    CHECK(kit.count(BlockState::kFree) == 16);
  }
  SUBCASE("too late, and the owner is gone, while this process places a frame of it") {
    const Placement placement = kit.data(id, request.to);
    REQUIRE(!placement.pieces.empty());
    SUBCASE("first too late") {
      kit.session->tick(kit.host.now += 101 * kMs);
      kit.session->on_writer_gone();
    }
    SUBCASE("first gone") {
      kit.session->on_writer_gone();
      kit.session->tick(kit.host.now += 101 * kMs);
    }
    CHECK(failure(*fetch) == ErrorCode::kDeadline);
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    kit.session->on_placed(placement.token, true);
    CHECK(kit.count(BlockState::kFree) == 16);
  }
  SUBCASE("reported done while this process still writes a frame of it") {
    const Placement placement = kit.data(id, {request.to[1]});
    REQUIRE(!placement.pieces.empty());
    SUBCASE("done") { kit.reply(kFetchVerb, id, fetched()); }
    SUBCASE("refused") { kit.refuse(kFetchVerb, id, Error(ErrorCode::kStaleAddress, "freed")); }
    CHECK(failure(*fetch) == ErrorCode::kProtocol);
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    kit.session->on_placed(placement.token, true);
    CHECK(kit.count(BlockState::kFree) == 16);
  }
  SUBCASE("lost") {
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    CHECK(failure(*fetch) == ErrorCode::kPeerLost);
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    kit.session->on_writer_gone();
    CHECK(kit.count(BlockState::kFree) == 16);
  }
}

TEST_CASE("blocks that this process may still write are not the caller's before the link has ended") {
  SessionKit kit(/*one_sided=*/false);
  const auto fetch = kit.session->fetch(fetch_for(kit, 1), /*frees_on_failure=*/true);
  kit.session->stop_writing(Error(ErrorCode::kPeerLost, "closed here"));
  CHECK(failure(*fetch) == ErrorCode::kPeerLost);
  CHECK(kit.count(BlockState::kQuarantined) == 1);
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "closed here"));
  CHECK(kit.count(BlockState::kFree) == 16);
}

// As when disconnect() ends the calls in one thread while the link ends in another.
TEST_CASE("a peer is watched while calls are being ended, because a fetch's destinations may be among them") {
  SessionKit kit;
  std::optional<bool> watched;
  const auto end_link = [&](const Message*, const Error*) {
    if (watched) return;
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "killed"));
    watched = kit.session->awaits_proof();
  };
  // Before and behind the fetch: in whatever order they end, one ends before it.
  kit.session->calls().begin(kAbandonVerb, 900, {}, kit.host.now + kMs, end_link);
  const auto fetch = kit.session->fetch(fetch_for(kit, 2), /*frees_on_failure=*/true);
  kit.session->calls().begin(kAbandonVerb, 901, {}, kit.host.now + kMs, end_link);
  kit.session->stop_writing(Error(ErrorCode::kPeerLost, "closed here"));
  CHECK(failure(*fetch) == ErrorCode::kPeerLost);
  CHECK(watched == true);
  CHECK(kit.count(BlockState::kQuarantined) == 2);
  CHECK(kit.session->awaits_proof());
  kit.session->on_writer_gone();
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK_FALSE(kit.session->awaits_proof());
}

TEST_CASE("a peer is not watched once the calls have ended and nothing is in quarantine") {
  SessionKit kit;
  kit.session->stop_writing(Error(ErrorCode::kPeerLost, "closed here"));
  CHECK(kit.session->awaits_proof());
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "killed"));
  CHECK_FALSE(kit.session->awaits_proof());
}

TEST_CASE("running out of memory while a fetch begins changes nothing") {
  const int threw = fail_each_allocation([&](auto&& fail) {
    SessionKit kit;
    kit.link->sent.reserve(8);
    const FetchRequest request = fetch_for(kit, 2);
    std::shared_ptr<Transfer> fetch;
    if (!fail([&] { fetch = kit.session->fetch(request, false); })) return;
    CHECK(kit.session->tick(kit.host.now + 1000 * kMs) == INT64_MAX);
    kit.pool->free(request.to.data(), request.to.size());
    CHECK(kit.count(BlockState::kFree) == 16);
  });
  CHECK(threw > 3);
}

TEST_CASE("content that a peer sends before the fetch is asked for keeps the destinations until it lies there") {
  std::uint64_t id = 0;
  {
    SessionKit kit;
    const auto first = kit.session->fetch(fetch_for(kit, 2), /*frees_on_failure=*/false);
    id = kit.take(kFetchVerb).id;  // numbers begin alike for every session
  }
  SessionKit kit;
  const FetchRequest request = fetch_for(kit, 2);
  Placement early;
  kit.host.when_asked_to_tick = [&] {
    early = kit.data(id, request.to);
    throw std::bad_alloc();
  };
  CHECK_THROWS_AS(static_cast<void>(kit.session->fetch(request, /*frees_on_failure=*/true)), std::bad_alloc);
  REQUIRE_FALSE(early.pieces.empty());
  CHECK(code_of([&] { kit.pool->free(request.to.data(), request.to.size()); }));
  CHECK(kit.count(BlockState::kQuarantined) == 2);
  kit.session->on_placed(early.token, true);
  CHECK(kit.count(BlockState::kFree) == 16);
}

}  // namespace
}  // namespace kvpool::testing
