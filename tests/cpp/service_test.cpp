// Two or more pools of this process that meet over real sockets.
#include "kvpool/pool/service.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/transport/reactor.h"
#include "pool_fixture.h"

namespace kvpool {
namespace {

using testing::Addresses;
using testing::alloc;
using testing::kPage;
using testing::prompt;
using testing::small_options;
using testing::Tokens;

constexpr std::int64_t kSecond = 1'000'000'000;
std::int64_t in_seconds(double seconds) { return monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9); }

struct Node {
  std::shared_ptr<Pool> pool;
  Service& service;
  std::string name;
};

Node make_node(const std::string& name, std::vector<std::string> routes = {}, std::uint32_t blocks = 16,
               const std::function<void(ServiceOptions&)>& change = {}) {
  PoolOptions options = small_options(blocks, blocks);
  options.audit = true;
  auto pool = std::make_shared<Pool>(options);
  ServiceOptions service;
  service.name = name;
  service.secret = "s3cret";
  service.routes = std::move(routes);
  if (change) change(service);
  return {pool, pool->start_service(service), name};
}

std::byte* bytes_of(Pool& pool, Address address) {
  const Segment& segment = pool.arena(static_cast<Medium>(medium_bits_of(address)))->segments()[0];
  return segment.base + block_of(address) * segment.stride;
}

void stamp(Pool& pool, const Addresses& addresses, int first) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    std::memset(bytes_of(pool, addresses[i]), first + static_cast<int>(i), pool.layout().block_bytes());
  }
}

bool is_stamped(Pool& pool, const std::vector<Address>& addresses, int first) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const std::byte* bytes = bytes_of(pool, addresses[i]);
    for (std::size_t at = 0; at < pool.layout().block_bytes(); ++at) {
      if (bytes[at] != static_cast<std::byte>(first + static_cast<int>(i))) return false;
    }
  }
  return true;
}

void finish(const std::shared_ptr<Transfer>& transfer) {
  REQUIRE(transfer->wait(in_seconds(10)));
  transfer->rethrow_if_failed();
}

TransferRequest request_to(const Node& peer, const Addresses& from) {
  TransferRequest request;
  request.peer = peer.name;
  request.from = from;
  request.deadline_ns = in_seconds(10);
  return request;
}

std::uint32_t blocks_in(Pool& pool, BlockState state) {
  const PoolStats stats = pool.audit();
  return stats.media[0].by_state[static_cast<std::size_t>(state)] +
         stats.media[1].by_state[static_cast<std::size_t>(state)];
}

// Links end in other threads.
bool all_free_soon(Pool& pool) {
  const std::int64_t until = in_seconds(5);
  while (blocks_in(pool, BlockState::kFree) < 32 && monotonic_ns() < until) usleep(1000);
  return blocks_in(pool, BlockState::kFree) == 32;
}

const std::vector<std::vector<std::string>> kRoutes = {{"loopback"}, {"shm"}, {"sock"}};

TEST_CASE("blocks reach a peer over every route and medium, with what the application is told") {
  for (const auto& routes : kRoutes) {
    for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
      CAPTURE(routes[0]);
      Node a = make_node("a", routes);
      Node b = make_node("b", routes);
      CHECK(a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5)) ==
            "b");
      const Addresses from = alloc(*a.pool, 5, medium == Medium::kHbm ? Medium::kDram : Medium::kHbm);
      stamp(*a.pool, from, 10);
      TransferRequest request = request_to(b, from);
      request.medium = medium;
      request.private_bytes = Bytes(3, std::byte{7});
      const auto transfer = a.service.transfer(std::move(request));
      finish(transfer);
      CHECK(is_stamped(*b.pool, transfer->addresses(), 10));
      CHECK(transfer->stats().route == routes[0]);
      CHECK(transfer->stats().bytes == 5 * a.pool->layout().block_bytes());
      const auto item = b.service.receive(in_seconds(5));
      REQUIRE(item != nullptr);
      CHECK(item->peer == "a");
      CHECK(item->addresses == transfer->addresses());
      CHECK(item->private_bytes == Bytes(3, std::byte{7}));
      b.pool->free(item->addresses.data(), item->addresses.size());
      a.pool->free(from.data(), from.size());
      CHECK(blocks_in(*a.pool, BlockState::kFree) == 32);
      CHECK(blocks_in(*b.pool, BlockState::kFree) == 32);
    }
  }
}

TEST_CASE("an insertion sends what the receiver has not, and is matched there") {
  for (const auto& routes : kRoutes) {
    CAPTURE(routes[0]);
    Node a = make_node("a", routes);
    Node b = make_node("b", routes);
    a.service.connect(b.service.listen("tcp:127.0.0.1:0"), in_seconds(5));
    const Tokens tokens = prompt(1, 6);
    const Tokens prefix(tokens.begin(), tokens.begin() + 4 * kPage);
    const Addresses from = alloc(*a.pool, 6);
    stamp(*a.pool, from, 20);
    for (const std::size_t pages : {std::size_t{4}, std::size_t{6}}) {
      TransferRequest request =
          request_to(b, Addresses(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(pages)));
      request.insert = true;
      request.tokens = Tokens(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(pages * kPage));
      const auto transfer = a.service.transfer(std::move(request));
      finish(transfer);
      CHECK(transfer->stats().skipped_blocks == (pages == 4 ? 0 : 4));
      CHECK(transfer->addresses().size() == pages);
    }
    auto found = testing::match(b.pool, tokens);
    CHECK(found.hit.pages == 6);
    CHECK(is_stamped(*b.pool, Addresses(found.addresses.begin(), found.addresses.begin() + 6), 20));
    CHECK(b.service.receive(0) == nullptr);  // nobody asked to tell the application
  }
}

TEST_CASE("lent blocks are written without a word, given back, and fetched from") {
  for (const auto& routes : kRoutes) {
    CAPTURE(routes[0]);
    Node a = make_node("a", routes);
    Node b = make_node("b", routes);
    a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5));
    const Addresses lent = a.service.alloc("b", 4, Medium::kHbm, true, in_seconds(5));
    CHECK(blocks_in(*b.pool, BlockState::kLent) == 4);
    const Addresses from = alloc(*a.pool, 4);
    stamp(*a.pool, from, 40);
    TransferRequest request = request_to(b, from);
    request.to = lent;
    const auto transfer = a.service.transfer(std::move(request));
    finish(transfer);
    CHECK(is_stamped(*b.pool, lent, 40));
    CHECK(b.service.receive(0) == nullptr);

    const Addresses back = alloc(*a.pool, 4, Medium::kDram);
    FetchRequest request_back;
    request_back.peer = "b";
    request_back.from = lent;
    request_back.to = back;
    request_back.deadline_ns = in_seconds(5);
    finish(a.service.fetch(std::move(request_back)));
    CHECK(is_stamped(*a.pool, back, 40));
    CHECK(blocks_in(*a.pool, BlockState::kActive) == 8);

    a.service.free(lent.data(), lent.size(), in_seconds(5));
    CHECK(blocks_in(*b.pool, BlockState::kFree) == 32);
    CHECK_THROWS_AS(a.service.free(lent.data(), 1, in_seconds(5)), Error);
  }
}

TEST_CASE("what a peer had is released when it leaves, and when its pool goes without a word") {
  for (const auto& routes : kRoutes) {
    for (const bool politely : {true, false}) {
      CAPTURE(routes[0]);
      CAPTURE(politely);
      Node b = make_node("b", routes);
      {
        Node a = make_node("a", routes);
        a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5));
        static_cast<void>(a.service.alloc("b", 4, Medium::kHbm, true, in_seconds(5)));
        CHECK(b.service.peers().size() == 1);
        if (politely) a.service.disconnect("b");
      }
      CHECK(all_free_soon(*b.pool));
      CHECK(b.service.peers().empty());
    }
  }
}

TEST_CASE("a peer that lives on is left with nothing in quarantine") {
  for (const auto& routes : kRoutes) {
    CAPTURE(routes[0]);
    Node a = make_node("a", routes);
    Node b = make_node("b", routes);
    a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5));
    static_cast<void>(a.service.alloc("b", 4, Medium::kHbm, true, in_seconds(5)));
    static_cast<void>(b.service.alloc("a", 3, Medium::kDram, true, in_seconds(5)));
    b.service.disconnect("a");
    CHECK(all_free_soon(*a.pool));
    CHECK(all_free_soon(*b.pool));
    // They may meet again.
    CHECK(b.service.connect(a.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5)) ==
          "a");
  }
}

TEST_CASE("own and lent blocks are freed together, or not at all") {
  Node a = make_node("a");
  Node b = make_node("b");
  a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5));
  Addresses mixed = a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(5));
  const Addresses own = alloc(*a.pool, 2);
  mixed.insert(mixed.begin() + 1, own.begin(), own.end());
  Addresses wrong = mixed;
  wrong.push_back(own[0]);
  CHECK_THROWS_AS(a.pool->free(wrong.data(), wrong.size()), Error);
  wrong.back() = wrong.front();
  CHECK_THROWS_AS(a.pool->free(wrong.data(), wrong.size()), Error);
  CHECK(blocks_in(*a.pool, BlockState::kActive) == 2);
  CHECK(blocks_in(*b.pool, BlockState::kLent) == 2);
  a.pool->free(mixed.data(), mixed.size());
  CHECK(blocks_in(*a.pool, BlockState::kFree) == 32);
  CHECK(blocks_in(*b.pool, BlockState::kFree) == 32);
}

TEST_CASE("a batch with a wrong request begins none of them") {
  Node a = make_node("a");
  Node b = make_node("b");
  a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5));
  const Addresses from = alloc(*a.pool, 2);
  std::vector<TransferRequest> requests{request_to(b, from), request_to(b, from)};
  requests[1].from[1] = 0;
  CHECK_THROWS_AS(static_cast<void>(a.service.transfer_batch(std::move(requests))), Error);
  CHECK(b.service.receive(in_seconds(0.05)) == nullptr);
  for (const auto& transfer : a.service.transfer_batch({request_to(b, from), request_to(b, from)})) finish(transfer);
  CHECK(b.service.receive(in_seconds(5)) != nullptr);
  CHECK(b.service.receive(in_seconds(5)) != nullptr);
}

TEST_CASE("a fetch allocates where it is not told, and frees when it fails") {
  Node a = make_node("a");
  Node b = make_node("b");
  a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5));
  const Addresses there = alloc(*b.pool, 3);
  stamp(*b.pool, there, 60);
  FetchRequest request;
  request.peer = "b";
  request.from = there;
  request.deadline_ns = in_seconds(5);
  const auto fetch = a.service.fetch(FetchRequest(request));
  finish(fetch);
  CHECK(is_stamped(*a.pool, fetch->addresses(), 60));
  b.pool->free(there.data(), there.size());
  const auto stale = a.service.fetch(FetchRequest(request));
  CHECK(stale->wait(in_seconds(5)));
  CHECK_THROWS_AS(stale->rethrow_if_failed(), Error);
  CHECK(blocks_in(*a.pool, BlockState::kActive) == 3);
}

TEST_CASE("a refused transfer leaves both sides as they were") {
  Node a = make_node("a");
  Node b = make_node("b", {}, 4);
  a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5));
  const Addresses from = alloc(*a.pool, 8);
  const auto transfer = a.service.transfer(request_to(b, from));
  CHECK(transfer->wait(in_seconds(5)));
  try {
    transfer->rethrow_if_failed();
    FAIL("it should have been refused");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kOutOfBlocks);
  }
  CHECK(blocks_in(*b.pool, BlockState::kFree) == 8);
  CHECK(blocks_in(*a.pool, BlockState::kActive) == 8);
}

TEST_CASE("many threads send at once, both ways") {
  for (const auto& routes : kRoutes) {
    CAPTURE(routes[0]);
    Node a = make_node("a", routes, 256);
    Node b = make_node("b", routes, 256);
    a.service.connect(b.service.listen("unix:@kvpool-test-" + std::to_string(monotonic_ns())), in_seconds(5));
    std::atomic<int> done{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 6; ++thread) {
      threads.emplace_back([&, thread] {
        Node& here = thread % 2 == 0 ? a : b;
        Node& there = thread % 2 == 0 ? b : a;
        for (int round = 0; round < 20; ++round) {
          const Addresses from = alloc(*here.pool, 4);
          stamp(*here.pool, from, thread * 20 + round);
          TransferRequest request = request_to(there, from);
          request.insert = round % 2 == 0;
          if (request.insert) request.tokens = prompt(thread * 1000 + round, 4);
          const auto transfer = here.service.transfer(std::move(request));
          if (!transfer->wait(in_seconds(20))) return;
          transfer->rethrow_if_failed();
          here.pool->free(from.data(), from.size());
          if (round % 2 != 0) {
            const auto item = there.service.receive(in_seconds(20));
            if (item == nullptr) return;
            there.pool->free(item->addresses.data(), item->addresses.size());
          }
          ++done;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(done == 120);
    CHECK(blocks_in(*a.pool, BlockState::kReserved) == 0);
    CHECK(blocks_in(*b.pool, BlockState::kActive) == 0);
  }
}

}  // namespace
}  // namespace kvpool
