// Transfers by the route nccl, between pools on fake GPUs.
#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
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

TEST_CASE("nccl: a block that takes two passes is one call") {
  NcclPair pair({std::size_t{3} << 19}, /*both_aggregated=*/true, {"nccl"}, NcclLimits{}.pass_ns, kNcclPassBytesMin);
  const Addresses blocks = pair.filled(pair.a, 2, 10);
  const auto sent = pair.a.service->transfer(NcclPair::request(pair.b, blocks));
  CHECK_FALSE(NcclPair::end_of(*sent));
  CHECK(pair.nccl.count("ncclGroupStart") >= 6);  // of passes, at either end
  CHECK(sent->stats().calls == 2);
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
  node.start_service(service);  // the failed one has left nothing
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
