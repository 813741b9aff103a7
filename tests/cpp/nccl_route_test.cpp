// Transfers by the route nccl, between pools on fake GPUs.
#include <doctest/doctest.h>

#include <vector>

#include "kvpool/routes/nccl/nccl_library.h"
#include "nccl_pools.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

TEST_CASE("nccl: blocks go both ways between GPUs with different layouts") {
  NcclPair pair;
  const Addresses of_a = pair.filled(pair.a, 7, 10);
  const Addresses of_b = pair.filled(pair.b, 5, 90);
  pair.exchange(pair.a, pair.b, of_a, 10);
  pair.exchange(pair.b, pair.a, of_b, 90);
  pair.exchange(pair.a, pair.b, of_a, 10);
  CHECK(pair.nccl.count("ncclCommInitRankConfig") == 4);  // a communicator for each direction, and both of its ends
  CHECK(pair.nccl.count("mismatches") == 0);
  CHECK(pair.b.count(BlockState::kReserved) == 0);
}

TEST_CASE("nccl: from DRAM and into DRAM") {
  NcclPair pair;
  const Addresses dram = pair.filled(pair.a, 3, 40, Medium::kDram);
  pair.exchange(pair.a, pair.b, dram, 40);
  const Addresses hbm = pair.filled(pair.a, 4, 70);
  TransferRequest request = NcclPair::request(pair.b, hbm);
  request.medium = Medium::kDram;
  const auto sent = pair.a.service->transfer(std::move(request));
  CHECK_FALSE(NcclPair::end_of(*sent));
  const auto received = pair.b.service->receive(NcclPair::in(30));
  REQUIRE(received != nullptr);
  CHECK(medium_of(received->addresses.front()) == Medium::kDram);
  CHECK(pair.are_filled(pair.b, received->addresses, 70));
}

TEST_CASE("nccl: large pieces are separate messages, and are not staged where they lie in a run") {
  NcclPair pair({std::size_t{512} << 10, std::size_t{512} << 10}, /*both_aggregated=*/true);
  const Addresses blocks = pair.filled(pair.a, 3, 10);
  const std::size_t copied = pair.cuda.count("copied");
  pair.exchange(pair.a, pair.b, blocks, 10);
  CHECK(pair.nccl.count("messages") == 6);  // three, at either end
  CHECK(pair.cuda.count("copied") == copied);
  CHECK(pair.nccl.count("mismatches") == 0);
}

TEST_CASE("nccl: a transfer of many passes") {
  NcclPair pair({std::size_t{1} << 20, std::size_t{1} << 20});
  const Addresses blocks = pair.filled(pair.a, 20, 10);  // 40 MiB
  pair.exchange(pair.a, pair.b, blocks, 10);
  CHECK(pair.nccl.count("ncclGroupStart") >= 6);
}

TEST_CASE("nccl: many transfers at once, both ways, by all strategies") {
  NcclPair pair;
  constexpr Strategy kAll[] = {Strategy::kAuto, Strategy::kByLayer, Strategy::kByLayerAgg, Strategy::kByRequest,
                               Strategy::kByRequestAgg};
  const Addresses of_a = pair.filled(pair.a, 2, 20);
  const Addresses of_b = pair.filled(pair.b, 2, 30);
  for (int round = 0; round < 4; ++round) {
    std::vector<std::shared_ptr<Transfer>> sent;
    for (const Strategy strategy : kAll) {
      for (const bool forth : {true, false}) {
        TransferRequest request = NcclPair::request(forth ? pair.b : pair.a, forth ? of_a : of_b);
        request.strategy = strategy;
        sent.push_back((forth ? pair.a : pair.b).service->transfer(std::move(request)));
      }
    }
    for (const auto& transfer : sent) {
      const auto error = NcclPair::end_of(*transfer);
      CHECK_MESSAGE(!error, std::string(error ? error->what() : ""));
    }
    for (std::size_t i = 0; i < sent.size() / 2; ++i) {
      const auto at_b = pair.b.service->receive(NcclPair::in(30));
      const auto at_a = pair.a.service->receive(NcclPair::in(30));
      REQUIRE(at_b != nullptr);
      REQUIRE(at_a != nullptr);
      CHECK(pair.are_filled(pair.b, at_b->addresses, 20));
      CHECK(pair.are_filled(pair.a, at_a->addresses, 30));
      pair.b.pool->free(at_b->addresses.data(), at_b->addresses.size());
      pair.a.pool->free(at_a->addresses.data(), at_a->addresses.size());
    }
  }
}

TEST_CASE("nccl: lent blocks, a fetch, and an insertion") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 4, 50);
  const Addresses lent = pair.a.service->alloc("b", 4, Medium::kHbm, true, {NcclPair::in(30), {}});
  TransferRequest request = NcclPair::request(pair.b, blocks);
  request.to = lent;
  request.private_bytes.reset();
  const auto sent = pair.a.service->transfer(std::move(request));
  CHECK_FALSE(NcclPair::end_of(*sent));
  CHECK(pair.are_filled(pair.b, lent, 50));
  pair.a.node->free(lent.data(), lent.size());
  CHECK(pair.b.count(BlockState::kLent) == 0);

  FetchRequest fetch;
  fetch.peer = "a";
  fetch.from = blocks;
  fetch.deadline_ns = NcclPair::in(30);
  const auto fetched = pair.b.service->fetch(std::move(fetch));
  CHECK_FALSE(NcclPair::end_of(*fetched));
  CHECK(pair.are_filled(pair.b, fetched->addresses(), 50));

  TransferRequest insertion = NcclPair::request(pair.b, blocks);
  insertion.insert = true;
  insertion.tokens = prompt(3, blocks.size());
  insertion.private_bytes.reset();
  const auto inserted = pair.a.service->transfer(std::move(insertion));
  CHECK_FALSE(NcclPair::end_of(*inserted));
  const Found found = match(pair.b.pool, prompt(3, blocks.size()));
  REQUIRE(found.addresses.size() == blocks.size());
  CHECK(pair.are_filled(pair.b, found.addresses, 50));
}

TEST_CASE("nccl: layers that are sent as they are computed") {
  NcclPair pair;
  const Addresses blocks = pair.filled(pair.a, 3, 60);
  TransferRequest request = NcclPair::request(pair.b, blocks);
  request.streamed = true;
  const auto sent = pair.a.service->transfer(std::move(request));
  sent->send_layer(1);
  sent->send_layer(0);
  sent->finish();
  CHECK_FALSE(NcclPair::end_of(*sent));
  const auto received = pair.b.service->receive(NcclPair::in(30));
  REQUIRE(received != nullptr);
  CHECK(pair.are_filled(pair.b, received->addresses, 60));
}

// ---- what goes wrong

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
  CHECK(NcclPair::eventually([&] { return pair.b.count(BlockState::kReserved) == 0; }));
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
  CHECK(NcclPair::eventually([&] { return pair.b.count(BlockState::kReserved) == 0; }));
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
  REQUIRE(NcclPair::eventually([&] { return pair.nccl.count("ncclGroupStart") >= groups + 2; }));
  CHECK(pair.b.count(BlockState::kReserved) == 2);
  // The other direction is not held up: it only waits for its own.
  CHECK(sent->cancel());
  const auto error = NcclPair::end_of(*sent);
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kCancelled);
  CHECK(NcclPair::eventually([&] { return pair.b.count(BlockState::kReserved) == 0; }));
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
    REQUIRE(NcclPair::eventually([&] { return pair.a.service->peers()[0].route_failures.size() == 1; }));
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
    REQUIRE(NcclPair::eventually([&] { return pair.nccl.count("ncclRecv") >= 1; }));
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
    CHECK(NcclPair::eventually([&] { return pair.b.count(BlockState::kFree) == 32; }));
    CHECK(NcclPair::eventually([&] { return pair.a.count(BlockState::kActive) == 3; }));
    CHECK(NcclPair::eventually([&] { return pair.nccl.count("communicators") == 0; }));
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
  REQUIRE(NcclPair::eventually([&] { return pair.nccl.count("ncclRecv") >= 1; }));
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
    REQUIRE(NcclPair::eventually([&] { return pair.a.service->peers().empty() && pair.b.service->peers().empty(); }));
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
    CHECK(NcclPair::eventually([&] { return pair.b.count(BlockState::kFree) == 32; }));
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
    CHECK(NcclPair::eventually([&] { return pair.b.count(BlockState::kFree) == 32; }));
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
    CHECK(NcclPair::eventually([&] { return pair.nccl.count("communicators") == 0; }));
    CHECK(NcclPair::eventually([&] { return pair.cuda.left().empty(); }));
  }
}

// ---- who may

TEST_CASE("nccl: a pool that is not on a GPU cannot name the route, and one that is needs the library") {
  FakeCuda cuda;
  FakeNccl nccl;
  ServiceOptions service;
  service.secret = "s3cret";
  service.transports.nccl = fake_nccl_path();
  service.routes = {"nccl"};
  const auto ordinary = std::make_shared<Pool>(small_options(4, 4));
  CHECK(code_of([&] { PeerNode(ordinary, make_ranks).start_service(service); }) == ErrorCode::kUnsupported);
  PoolOptions options = small_options(4, 0);
  options.device = 0;
  const auto on_gpu = std::make_shared<Pool>(options);
  service.transports.nccl = "/nowhere";
  std::string text;
  PeerNode node(on_gpu, make_ranks);
  CHECK(code_of([&] { node.start_service(service); }, &text) == ErrorCode::kUnsupported);
  CHECK(text.find("kvpool[nccl") != std::string::npos);
  service.transports.nccl = fake_nccl_path();
  node.start_service(service);  // nothing is left of what failed
}

TEST_CASE("nccl: there is no checksum of memory that the CPU cannot read") {
  NcclPair pair;
  TransferRequest request = NcclPair::request(pair.b, pair.filled(pair.a, 1, 10));
  request.checksum = true;
  CHECK(code_of([&] { pair.a.service->transfer(std::move(request)); }) == ErrorCode::kUnsupported);
}

TEST_CASE("nccl: the library is checked before it is used") {
  FakeNccl nccl;
  const NcclLibrary& library = load_nccl(fake_nccl_path());
  CHECK(library.version_text() == "2.28.9");
  CHECK(&load_nccl(fake_nccl_path()) == &library);
  CHECK(code_of([] { load_nccl("wheel"); }) == ErrorCode::kUnsupported);
  CHECK(code_of([] { load_nccl(fake_cuda_path()); }) == ErrorCode::kUnsupported);  // a library, but another one
  nccl.set("version", 21700);
  const std::string other = std::string(fake_nccl_path());
  const std::string by_other_name = other.substr(0, other.rfind('/')) + "/." + other.substr(other.rfind('/'));
  const std::string text = text_of([&] { load_nccl(by_other_name); });
  CHECK_MESSAGE(text.find("2.17.0") != std::string::npos, text);
  CHECK_MESSAGE(text.find("2.18.0 or newer") != std::string::npos, text);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
