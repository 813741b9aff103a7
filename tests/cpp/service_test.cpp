// A service apart from its verbs (verbs_test.cpp): connecting and disconnecting, own and lent blocks in one list,
// batches, threads.
#include "kvpool/peers/service.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "joined_service.h"
#include "kvpool/base/clock.h"

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kBlocks = 32;  // of a pool, in both media
const std::vector<std::vector<std::string>> kRoutes = {{"loopback"}, {"shm"}, {"sock"}};

void finish(const std::shared_ptr<Transfer>& transfer) {
  REQUIRE(transfer->wait(real_seconds(10)));
  transfer->rethrow_if_failed();
}

TransferRequest request_to(const ServiceNode& peer, const Addresses& from) {
  TransferRequest request;
  request.peer = peer.name();
  request.from = from;
  request.deadline_ns = real_seconds(10);
  return request;
}

// Links end in other threads.
bool all_free_soon(ServiceNode& node) {
  const std::int64_t until = real_seconds(60);
  while (node.count(BlockState::kFree) < kBlocks && monotonic_ns() < until) usleep(1000);
  return node.count(BlockState::kFree) == kBlocks;
}

TEST_CASE("a peer's blocks are released when it disconnects, and when its pool vanishes without a word") {
  for (const auto& routes : kRoutes) {
    for (const bool politely : {true, false}) {
      CAPTURE(routes[0]);
      CAPTURE(politely);
      ServiceNode b("b", routes);
      {
        ServiceNode a("a", routes);
        a.meet(b);
        static_cast<void>(a.borrow(4, Medium::kHbm));
        CHECK(b.service().peers().size() == 1);
        if (politely) a.service().disconnect("b");
      }
      CHECK(all_free_soon(b));
      CHECK(b.service().peers().empty());
    }
  }
}

TEST_CASE("a peer that lives on leaves nothing in quarantine") {
  for (const auto& routes : kRoutes) {
    CAPTURE(routes[0]);
    ServiceNode a("a", routes);
    ServiceNode b("b", routes);
    a.meet(b);
    static_cast<void>(a.borrow(4, Medium::kHbm));
    static_cast<void>(b.borrow(3, Medium::kDram));
    b.service().disconnect("a");
    CHECK(all_free_soon(a));
    CHECK(all_free_soon(b));
    CHECK(b.connect(a) == "a");  // they may connect again
  }
}

TEST_CASE("own and lent blocks are freed together, or not at all") {
  ServiceNode a("a");
  ServiceNode b("b");
  a.meet(b);
  Addresses mixed = a.borrow(2, Medium::kHbm);
  const Addresses own = alloc(*a.pool(), 2);
  mixed.insert(mixed.begin() + 1, own.begin(), own.end());
  Addresses wrong = mixed;
  wrong.push_back(own[0]);
  CHECK_THROWS_AS(free_all(a.peer_node(), wrong), Error);
  wrong.back() = wrong.front();
  CHECK_THROWS_AS(free_all(a.peer_node(), wrong), Error);
  CHECK(a.count(BlockState::kActive) == 2);
  CHECK(b.count(BlockState::kLent) == 2);
  free_all(a.peer_node(), mixed);
  CHECK(a.count(BlockState::kFree) == kBlocks);
  CHECK(b.count(BlockState::kFree) == kBlocks);
  CHECK_THROWS_AS(a.give_back({mixed[0]}), Error);
}

TEST_CASE("4 MiB written to lent blocks have arrived when the call returns, whatever threads copy") {
  constexpr std::size_t kMany = 16;
  PairOptions options;
  options.piece_bytes = {std::size_t{256} << 10};
  for (const auto& routes : {kRoutes[0], kRoutes[1]}) {
    CAPTURE(routes[0]);
    ServiceNode a("a", routes, options, {});
    ServiceNode b("b", routes, options, {});
    a.meet(b);
    const Addresses from = alloc(*a.pool(), kMany);
    const Addresses lent = a.borrow(kMany, Medium::kHbm);
    for (std::uint64_t round = 0; round < 5; ++round) {
      for (std::size_t i = 0; i < kMany; ++i) stamp(*a.pool(), from[i], round + i);
      TransferRequest request = request_to(b, from);
      request.to = lent;
      const auto transfer = a.transfer(std::move(request));
      CHECK(transfer->wait(0));  // asks, and does not wait
      CHECK(are_stamped(*b.pool(), lent, round));
      finish(transfer);
    }
    a.give_back(lent);
    free_all(*a.pool(), from);
  }
}

TEST_CASE("a batch with a wrong request begins no request") {
  ServiceNode a("a");
  ServiceNode b("b");
  a.meet(b);
  const Addresses from = alloc(*a.pool(), 2);
  std::vector<TransferRequest> requests{request_to(b, from), request_to(b, from)};
  std::vector<TransferRequest> wrong = requests;
  wrong[1].from[1] = 0;
  CHECK_THROWS_AS(static_cast<void>(a.service().transfer_batch(std::move(wrong))), Error);
  CHECK(b.service().receive(real_seconds(0.05)) == nullptr);
  for (const auto& transfer : a.service().transfer_batch(std::move(requests))) finish(transfer);
  CHECK(b.service().receive(real_seconds(60)) != nullptr);
  CHECK(b.service().receive(real_seconds(60)) != nullptr);
}

TEST_CASE("a fetch without destinations allocates them, and frees them when it fails") {
  ServiceNode a("a");
  ServiceNode b("b");
  a.meet(b);
  const Addresses there = alloc_stamped(*b.pool(), 3, 60);
  FetchRequest request;
  request.from = there;
  request.deadline_ns = real_seconds(60);
  const auto fetch = a.fetch(FetchRequest(request));
  finish(fetch);
  CHECK(are_stamped(*a.pool(), fetch->addresses(), 60));
  free_all(*b.pool(), there);
  const auto stale = a.fetch(FetchRequest(request));
  CHECK(stale->wait(real_seconds(60)));
  CHECK_THROWS_AS(stale->rethrow_if_failed(), Error);
  CHECK(a.count(BlockState::kActive) == 3);
}

TEST_CASE("many threads send at once, both ways") {
  for (const auto& routes : kRoutes) {
    CAPTURE(routes[0]);
    ServiceNode a("a", routes, 256);
    ServiceNode b("b", routes, 256);
    a.meet(b);
    std::atomic<int> done{0};
    std::vector<std::thread> threads;
    threads.reserve(6);
    for (int thread = 0; thread < 6; ++thread) {
      threads.emplace_back([&, thread] {
        ServiceNode& here = thread % 2 == 0 ? a : b;
        ServiceNode& there = thread % 2 == 0 ? b : a;
        for (int round = 0; round < 20; ++round) {
          const auto first = static_cast<std::uint64_t>(thread * 1000 + round * 10);
          const Addresses from = alloc_stamped(*here.pool(), 4, first);
          TransferRequest request = request_to(there, from);
          request.insert = round % 2 == 0;
          if (request.insert) request.tokens = prompt(thread * 1000 + round, 4);
          const auto transfer = here.transfer(std::move(request));
          if (!transfer->wait(real_seconds(20))) return;
          transfer->rethrow_if_failed();
          free_all(*here.pool(), from);
          if (round % 2 != 0) {
            const auto item = there.service().receive(real_seconds(20));
            if (item == nullptr) return;
            free_all(*there.pool(), item->addresses);
          }
          ++done;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(done == 120);
    CHECK(a.count(BlockState::kReserved) == 0);
    CHECK(b.count(BlockState::kActive) == 0);
  }
}

}  // namespace
}  // namespace kvpool::testing
