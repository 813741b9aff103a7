// Transfers by the route nccl that go wrong: what is late, cancelled, lost or refused, and which route serves then.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <utility>

#include "nccl_pools.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

TEST_CASE("nccl: a communicator that is never complete ends at the deadline, and the next transfer makes another") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  pair.nccl.set("join", 0);
  const auto late = pair.a.service->transfer(NcclPair::request(pair.b, blocks, 0.3));
  const auto error = NcclPair::end_of(*late);
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kDeadline);
  pair.nccl.set("join", 1);
  pair.exchange(pair.a, pair.b, blocks, 10);
  CHECK(soon([&] { return pair.b.count(BlockState::kReserved) == 0; }));
}

TEST_CASE("nccl: content that never arrives ends at the deadline") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  pair.exchange(pair.a, pair.b, blocks, 10);
  pair.nccl.set("stall", 1);
  const auto late = pair.a.service->transfer(NcclPair::request(pair.b, blocks, 0.3));
  const auto error = NcclPair::end_of(*late);
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kDeadline);
  CHECK(soon([&] { return pair.b.count(BlockState::kReserved) == 0; }));
  pair.nccl.set("stall", 0);
  pair.exchange(pair.a, pair.b, blocks, 10);
}

TEST_CASE("nccl: a receiver waits for a pass no longer than its limit, whatever the sender says") {
  NcclPair pair({48, 80, 64, 64}, false, {"nccl"}, /*pass_ns=*/kNcclSecond / 5);
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  pair.exchange(pair.a, pair.b, blocks, 10);
  pair.nccl.set("stall", 1);
  const auto late = pair.a.service->transfer(NcclPair::request(pair.b, blocks, 600));
  const auto error = NcclPair::end_of(*late);
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kRouteFailed);
  CHECK(soon([&] { return pair.b.count(BlockState::kReserved) == 0; }));
  pair.nccl.set("stall", 0);
  pair.exchange(pair.a, pair.b, blocks, 10);
}

TEST_CASE("nccl: a transfer that is cancelled in the middle holds up nothing") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  pair.exchange(pair.a, pair.b, blocks, 10);
  pair.nccl.set("stall", 1);
  const std::size_t groups = pair.nccl.count("ncclGroupStart");
  const auto sent = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
  REQUIRE(soon([&] { return pair.nccl.count("ncclGroupStart") >= groups + 2; }));
  CHECK(pair.b.count(BlockState::kReserved) == 2);
  // The other direction is not held up: it only waits for its own.
  CHECK(sent->cancel());
  const auto error = NcclPair::end_of(*sent);
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kCancelled);
  CHECK(soon([&] { return pair.b.count(BlockState::kReserved) == 0; }));
  pair.nccl.set("stall", 0);
  pair.exchange(pair.a, pair.b, blocks, 10);
}

TEST_CASE("nccl: a failure in the stream fails the transfer, not the peer") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  for (const int message : {1, 2}) {  // at either end
    pair.nccl.set("break_in", message);
    const auto sent = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
    const auto error = NcclPair::end_of(*sent);
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kRouteFailed);
    REQUIRE(pair.a.service->peers().size() == 1);
    const auto failures = pair.a.service->peers()[0].route_failures;
    REQUIRE(failures.size() == 1);
    CHECK(failures[0].route == "nccl");
    CHECK(failures[0].report.why == error->what());
    pair.nccl.set("break_in", 0);
    pair.exchange(pair.a, pair.b, blocks, 10);
    CHECK(pair.a.service->peers().size() == 1);
    CHECK(pair.a.service->peers()[0].route_failures.empty());
  }
  CHECK(pair.b.count(BlockState::kReserved) == 0);
}

TEST_CASE("nccl: after NCCL has failed, another route serves") {
  NcclPair pair({48, 80, 64, 64}, false, {"nccl", "sock"});
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  pair.nccl.set("break_in", 1);
  TransferRequest by_nccl = NcclPair::request(pair.b, blocks);
  by_nccl.route = "nccl";
  const auto failed = NcclPair::end_of(*pair.a.service->transfer(std::move(by_nccl)));
  REQUIRE(failed);
  CHECK(failed->code() == ErrorCode::kRouteFailed);
  pair.nccl.set("break_in", 0);
  const auto next = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
  CHECK_FALSE(NcclPair::end_of(*next));
  CHECK(next->stats().route == "sock");
  CHECK(pair.a.service->peers()[0].route_failures.size() == 1);
  // A transfer that names it still tries it, and then it is usable as before.
  TransferRequest again = NcclPair::request(pair.b, blocks);
  again.route = "nccl";
  CHECK_FALSE(NcclPair::end_of(*pair.a.service->transfer(std::move(again))));
  CHECK(pair.a.service->peers()[0].route_failures.empty());
}

TEST_CASE("nccl: after a pass has stood still to the deadline, or a communicator was not made, another route serves") {
  for (const char* what : {"stall", "join"}) {
    CAPTURE(what);
    NcclPair pair({48, 80, 64, 64}, false, {"nccl", "sock"});
    const Addresses blocks = pair.filled(pair.a, 2, 10);
    pair.nccl.set(what, what == std::string("stall") ? 1 : 0);
    TransferRequest by_nccl = NcclPair::request(pair.b, blocks, 3);
    by_nccl.route = "nccl";
    const auto late = NcclPair::end_of(*pair.a.service->transfer(std::move(by_nccl)));
    REQUIRE(late);
    CHECK(late->code() == ErrorCode::kDeadline);
    // The transfer ends by its deadline; the thread that waits for the pass notes soon after that the pass has not
    // ended.
    REQUIRE(soon([&] { return pair.a.service->peers()[0].route_failures.size() == 1; }));
    const auto failures = pair.a.service->peers()[0].route_failures;
    CHECK(failures[0].route == "nccl");
    CHECK(failures[0].report.able);
    CHECK(failures[0].report.why.find("had not ended") != std::string::npos);
    const auto next = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
    CHECK_FALSE(NcclPair::end_of(*next));
    CHECK(next->stats().route == "sock");
    pair.nccl.set(what, what == std::string("stall") ? 0 : 1);
  }
}

TEST_CASE("nccl: a caller's short deadline does not count against the route") {
  NcclPair pair({48, 80, 64, 64}, false, {"nccl", "sock"});
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  pair.nccl.set("stall", 1);
  TransferRequest by_nccl = NcclPair::request(pair.b, blocks, 0.2);
  by_nccl.route = "nccl";
  const auto late = NcclPair::end_of(*pair.a.service->transfer(std::move(by_nccl)));
  REQUIRE(late);
  CHECK(late->code() == ErrorCode::kDeadline);
  CHECK(pair.a.service->peers()[0].route_failures.empty());
}

TEST_CASE("nccl: a GPU without room for staging leaves the peer to other routes") {
  NcclPair pair({48, 80, 64, 64}, false, {"nccl", "sock"});
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  pair.cuda.fail("cuMemAlloc", 2);
  TransferRequest by_nccl = NcclPair::request(pair.b, blocks);
  by_nccl.route = "nccl";
  const auto failed = NcclPair::end_of(*pair.a.service->transfer(std::move(by_nccl)));
  REQUIRE(failed);
  CHECK(failed->code() == ErrorCode::kUnsupported);
  pair.cuda.fail("cuMemAlloc", 0);
  const auto next = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
  CHECK_FALSE(NcclPair::end_of(*next));
  CHECK(next->stats().route == "sock");
  const auto failures = pair.a.service->peers()[0].route_failures;
  REQUIRE(failures.size() == 1);
  CHECK_FALSE(failures[0].report.able);
  CHECK(failures[0].report.why.find("nccl_pass_bytes") != std::string::npos);
}

TEST_CASE("nccl: a peer is lost in the middle: both sides end, and no block is lost") {
  for (const bool receiver_ends : {true, false}) {
    NcclPair pair;
    const Addresses blocks = pair.filled(pair.a, 3, 10);
    const Addresses lent = pair.a.service->alloc("b", 2, Medium::kHbm, true, {NcclPair::in(30), {}});
    pair.nccl.set("stall", 1);
    const auto sent = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
    TransferRequest named = NcclPair::request(pair.b, {blocks[0], blocks[1]});
    named.to = lent;
    const auto to_lent = pair.a.service->transfer(std::move(named));
    FetchRequest fetch;
    fetch.peer = "a";
    fetch.from = blocks;
    fetch.deadline_ns = NcclPair::in(30);
    const auto fetched = pair.b.service->fetch(std::move(fetch));
    REQUIRE(soon([&] { return pair.nccl.count("ncclRecv") >= 1; }));
    if (receiver_ends) {
      pair.b.service->disconnect("a", {});
    } else {
      pair.a.service->disconnect("b", {});
    }
    for (const auto& transfer : {sent, to_lent, fetched}) {
      const auto error = NcclPair::end_of(*transfer);
      REQUIRE(error);
      CHECK(error->code() == ErrorCode::kPeerLost);
    }
    CHECK(soon([&] { return pair.b.count(BlockState::kFree) == 32; }));
    CHECK(soon([&] { return pair.a.count(BlockState::kActive) == 3; }));
    CHECK(soon([&] { return pair.nccl.count("communicators") == 0; }));
    pair.nccl.set("stall", 0);
    pair.meet();
    pair.exchange(pair.a, pair.b, blocks, 10);
  }
}

TEST_CASE("nccl: closing a pool in the middle of a transfer does not wait for it") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 3, 10);
  pair.nccl.set("stall", 1);
  const auto sent = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
  REQUIRE(soon([&] { return pair.nccl.count("ncclRecv") >= 1; }));
  pair.b.pool->close();
  const auto error = NcclPair::end_of(*sent);
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kPeerLost);
}

TEST_CASE("nccl: if any NCCL call fails, a transfer is done or it is not, and the next one is done") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 3, 10);
  for (int n = 1;; ++n) {
    // The communicators are new each time.
    pair.a.service->disconnect("b", {});
    REQUIRE(soon([&] { return pair.a.service->peers().empty() && pair.b.service->peers().empty(); }));
    pair.meet();
    pair.nccl.fail_nth(n, 2);
    const auto sent = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
    const auto error = NcclPair::end_of(*sent);
    const bool reached = pair.nccl.failed();
    pair.nccl.fail_nth(0, 0);
    if (error) {
      CHECK(error->code() == ErrorCode::kRouteFailed);
    } else {
      const auto received = pair.b.service->receive(NcclPair::in(30));
      REQUIRE(received != nullptr);
      CHECK(pair.are_filled(pair.b, received->addresses, 10));
      pair.b.pool->free(received->addresses.data(), received->addresses.size());
    }
    pair.exchange(pair.a, pair.b, blocks, 10);
    CHECK(soon([&] { return pair.b.count(BlockState::kFree) == 32; }));
    if (!reached || n > 40) break;
  }
}

TEST_CASE("nccl: if any driver call fails, a transfer is done or it is not, and the next one is done") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 3, 10);
  pair.exchange(pair.a, pair.b, blocks, 10);
  for (int n = 1; n <= 24; ++n) {
    pair.cuda.fail_nth(n, 801);
    const auto sent = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
    const auto error = NcclPair::end_of(*sent);
    pair.cuda.fail_nth(0, 0);
    if (error) {
      const ErrorCode code = error->code();
      CHECK((is_the_routes_own(code) || code == ErrorCode::kDeviceLost));
    } else {
      const auto received = pair.b.service->receive(NcclPair::in(30));
      REQUIRE(received != nullptr);
      CHECK(pair.are_filled(pair.b, received->addresses, 10));
      pair.b.pool->free(received->addresses.data(), received->addresses.size());
    }
    pair.exchange(pair.a, pair.b, blocks, 10);
    CHECK(soon([&] { return pair.b.count(BlockState::kFree) == 32; }));
  }
}

TEST_CASE("nccl: a late answer of NCCL is waited for") {
  NcclPair pair;
  pair.nccl.set("polls", 50);
  const Addresses blocks = pair.filled(pair.a, 3, 10);
  pair.exchange(pair.a, pair.b, blocks, 10);
}

TEST_CASE("nccl: everything is given back") {
  FakeCuda cuda;
  {
    NcclPair pair;
    const Addresses blocks = pair.filled(pair.a, 3, 10);
    pair.exchange(pair.a, pair.b, blocks, 10);
    pair.exchange(pair.a, pair.b, blocks, 10);
    pair.a.pool->close();
    pair.b.pool->close();
    pair.a.node.reset();
    pair.b.node.reset();
    pair.a.pool.reset();
    pair.b.pool.reset();
    CHECK(soon([&] { return pair.nccl.count("communicators") == 0; }));
    CHECK(soon([&] { return pair.cuda.left().empty(); }));
  }
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
