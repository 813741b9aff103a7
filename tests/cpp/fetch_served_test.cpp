// Fetches that a peer asks for: what is pushed, to whom, and how each ends.
#include <doctest/doctest.h>

#include "failing_alloc.h"
#include "kvpool/transfer/fetch.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

TEST_CASE("a fetch that a peer asks for is pushed or refused, and its blocks are held while they are read") {
  SessionKit kit;
  const Addresses from = alloc(*kit.pool, 2);
  FetchBody body{Priority::kPrefill, from, SessionKit::peer_addresses(2)};
  const std::uint64_t id = kFetchBit | 3;
  SUBCASE("done") {
    kit.ask(kFetchVerb, id, write_body(body), 100);
    kit.pool->free(from.data(), from.size());
    CHECK(kit.count(BlockState::kFree) == 14);
    kit.host.end_write();
    CHECK(kit.answer().kind == FrameKind::kAnswer);
  }
  SUBCASE("cancelled") {
    kit.ask(kFetchVerb, id, write_body(body), 100);
    kit.cancel(kFetchVerb, id);
    CHECK(kit.link->sent.empty());  // it writes still
    CHECK(kit.host.writes.at(0).request.cancelled->load());
    const Error stopped(ErrorCode::kCancelled, "stopped");
    kit.host.end_write(&stopped);
    CHECK(kit.refusal() == ErrorCode::kCancelled);
    kit.pool->free(from.data(), from.size());
  }
  SUBCASE("with a GPU that is lost meanwhile") {  // the peer that asked is not told that nothing is written
    kit.ask(kFetchVerb, id, write_body(body), 100);
    const Error lost(ErrorCode::kDeviceLost, "gone");
    kit.host.end_write(&lost);
    CHECK(kit.link->closed);
    CHECK(kit.link->sent.empty());
    kit.pool->free(from.data(), from.size());
  }
  SUBCASE("stale") {
    kit.pool->free(from.data(), from.size());
    kit.ask(kFetchVerb, id, write_body(body), 100);
    CHECK(kit.refusal() == ErrorCode::kStaleAddress);
  }
  SUBCASE("into blocks that the peer does not have") {
    body.to[1] = make_address(kPeerInstance, Medium::kHbm, 1, kPeerBlocks);
    kit.ask(kFetchVerb, id, write_body(body), 100);
    CHECK(kit.refusal() == ErrorCode::kProtocol);
    kit.pool->free(from.data(), from.size());
  }
  SUBCASE("by a number that is no fetch's") {
    kit.ask(kFetchVerb, 3, write_body(body), 100);
    CHECK(kit.refusal() == ErrorCode::kProtocol);
    kit.pool->free(from.data(), from.size());
  }
  SUBCASE("too many at once") {
    kit.host.limits_of.transfers_max = 1;
    kit.ask(kFetchVerb, id, write_body(body), 100);
    kit.ask(kFetchVerb, id + 1, write_body(body), 100);
    CHECK(kit.refusal() == ErrorCode::kBusy);
    kit.host.end_write();
    kit.pool->free(from.data(), from.size());
  }
  SUBCASE("too long a list of what waits") {
    kit.host.limits_of.request_bytes_max = 2 * 2 * sizeof(Address);
    kit.ask(kFetchVerb, id, write_body(body), 100);
    CHECK(kit.host.writes.front().peer == kPeerIncarnation);
    kit.ask(kFetchVerb, id + 1, write_body(body), 100);
    CHECK(kit.refusal() == ErrorCode::kBusy);
    kit.host.end_write();
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    kit.ask(kFetchVerb, id + 1, write_body(body), 100);
    kit.host.end_write();
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    kit.pool->free(from.data(), from.size());
  }
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("a peer may read blocks that it has borrowed, and not those that another peer has") {
  SessionKit kit;
  const auto ask = [&](std::uint64_t id, const Addresses& from) {
    kit.ask(kFetchVerb, id | kFetchBit,
            write_body(FetchBody{Priority::kPrefill, from, SessionKit::peer_addresses(from.size())}));
  };
  ask(1, kit.lend(2, 1));
  CHECK(kit.host.writes.size() == 1);
  ask(3, *kit.peer_blocks.lend(1, Medium::kHbm, {kPeerIncarnation + 1, 0}, Room::kFree));
  CHECK(kit.host.writes.size() == 1);
  CHECK(kit.refusal() == ErrorCode::kNotOwner);
}

// Else one peer's fetches would keep the writes to all others waiting.
TEST_CASE("a peer's fetch is never more urgent here than a local prompt, whatever it asks for") {
  SessionKit kit;
  const Addresses lent = kit.lend(1, 1);
  for (const auto& [said, got] :
       {std::pair(Priority::kDecode, Priority::kPrefill), std::pair(Priority::kPrefill, Priority::kPrefill),
        std::pair(Priority::kBackground, Priority::kBackground)}) {
    kit.ask(kFetchVerb, (2 + static_cast<std::uint64_t>(said)) | kFetchBit,
            write_body(FetchBody{said, lent, SessionKit::peer_addresses(1)}));
    REQUIRE(!kit.host.writes.empty());
    CHECK(kit.host.writes.back().priority == got);
  }
}

TEST_CASE("an owner that is asked for a checksum says it of what it has written, by the route that was named") {
  SessionKit kit;
  const Addresses from = alloc(*kit.pool, 2);
  FetchBody body{Priority::kPrefill, from, SessionKit::peer_addresses(2), true, "script"};
  SUBCASE("it is read before the blocks are let go of") {
    kit.ask(kFetchVerb, kFetchBit | 3, write_body(body), 100);
    const std::uint32_t right = kit.peer_blocks.checksum(from);
    kit.host.end_write();
    CHECK(kit.link->sent.empty());
    kit.pool->free(from.data(), from.size());
    CHECK(kit.count(BlockState::kFree) == 14);  // held
    kit.host.run_works();
    const FetchedBody said = read_fetched(kit.answer().body);
    CHECK(said.checksum == right);
    CHECK(said.route == "script");
    CHECK(said.calls == 1);
    REQUIRE(kit.session->sent_bytes().by_route().size() == 1);
    CHECK(kit.session->sent_bytes().by_route()[0].bytes == kit.bytes_of(2));
  }
  SUBCASE("nothing is read for a caller that has cancelled meanwhile") {
    kit.ask(kFetchVerb, kFetchBit | 3, write_body(body), 100);
    kit.host.end_write();
    kit.cancel(kFetchVerb, kFetchBit | 3);
    kit.host.run_works();
    CHECK(kit.refusal() == ErrorCode::kCancelled);
    kit.pool->free(from.data(), from.size());
  }
  SUBCASE("a route that there is not") {
    body.route = "carrier pigeon";
    kit.ask(kFetchVerb, kFetchBit | 3, write_body(body), 100);
    CHECK(kit.refusal() == ErrorCode::kUnsupported);
    kit.pool->free(from.data(), from.size());
  }
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("running out of memory while serving a fetch ends in an answer or the end of the link") {
  int attempts = 0;
  fail_each_allocation([&](auto&& fail) {
    ++attempts;
    SessionKit kit;
    kit.link->sent.reserve(8);
    const Addresses from = alloc(*kit.pool, 2);
    const FetchBody body{Priority::kPrefill, from, SessionKit::peer_addresses(2)};
    Message message{FrameKind::kCall, kFetchVerb.number, kFetchBit | 3, write_body(body), 100};
    fail([&] {
      try {
        kit.session->on_message(std::move(message));
        if (!kit.host.writes.empty()) kit.host.end_write();
      } catch (const std::bad_alloc&) {
        kit.link->close(Error(ErrorCode::kOutOfMemory, ""));
        throw;
      }
    });
    CHECK((kit.link->sent.size() == 1 || kit.link->closed));
    kit.pool->free(from.data(), from.size());
    CHECK(kit.count(BlockState::kFree) == 16);
  });
  CHECK(attempts > 5);
}

}  // namespace
}  // namespace kvpool::testing
