// A service that has no lease, or no id yet, keeps to itself; and which id it has.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "members_kit.h"
#include "thrown.h"

namespace kvpool::testing {
using namespace services;  // NOLINT(google-build-using-namespace)
namespace {

TEST_CASE("a pool without its lease has no peers and gets none; local calls go on") {
  for (const auto& routes : std::vector<std::vector<std::string>>{{"shm"}, {"sock"}}) {
    CAPTURE(routes[0]);
    Pair pair(routes);
    static_cast<void>(pair.b.service.alloc("a", 3, Medium::kHbm, true, in_seconds(60)));
    static_cast<void>(pair.a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(60)));
    const Addresses blocks = alloc(*pair.a.pool, 1);
    TransferRequest request = request_to(pair.b, blocks);
    request.streamed = true;
    const auto open = pair.a.service.transfer(std::move(request));
    for (int i = 0; i < 2; ++i) pair.a.service.fence("no lease");
    REQUIRE(open->wait(in_seconds(10)));
    CHECK(code_of([&] { open->rethrow_if_failed(); }) == ErrorCode::kPeerLost);
    std::string text;
    CHECK(code_of([&] { send_one(pair.a, pair.b); }, &text) == ErrorCode::kFenced);
    CHECK(text == "no lease");
    CHECK(code_of([&] { pair.a.service.connect(pair.members[1].addresses[0], in_seconds(60)); }) == ErrorCode::kFenced);
    CHECK_FALSE(is_let_in(pair.b, pair.members[0].addresses[0]));
    CHECK(soon([&] { return pair.a.service.peers().empty() && pair.b.service.peers().empty(); }));
    pair.a.pool->free(blocks.data(), blocks.size());
    CHECK(all_free_soon(*pair.a.pool));
    CHECK(all_free_soon(*pair.b.pool));
    for (int i = 0; i < 2; ++i) pair.a.service.unfence();
    send_one(pair.a, pair.b);
    send_one(pair.b, pair.a);
  }
}

TEST_CASE("a fenced pool admits a caller once it has its lease again, within the call's deadline") {
  Pair pair;
  pair.b.service.fence("no lease");
  std::thread regains([&] {
    usleep(50'000);
    pair.b.service.unfence();
  });
  send_one(pair.a, pair.b);
  regains.join();
}

TEST_CASE("fencing and expelling amid many transfers lose no block, and end every one of them") {
  constexpr int kRounds = 15;
  Pair pair;
  std::atomic<bool> stop{false};
  std::atomic<int> unended{0};
  std::vector<std::thread> senders;
  std::array<Addresses, 4> all_blocks;  // before any of them is filled by the other
  for (int i = 0; i < 4; ++i) all_blocks[static_cast<std::size_t>(i)] = alloc(*(i % 2 == 0 ? pair.a : pair.b).pool, 2);
  for (int i = 0; i < 4; ++i) {
    senders.emplace_back([&, i] {
      const Node& from = i % 2 == 0 ? pair.a : pair.b;
      const Node& to = i % 2 == 0 ? pair.b : pair.a;
      const Addresses& blocks = all_blocks[static_cast<std::size_t>(i)];
      while (!stop) {
        static_cast<void>(error_of([&] {
          TransferRequest request = request_to(to, blocks);
          request.deadline_ns = in_seconds(2);
          const auto transfer = from.service.transfer(std::move(request));
          if (!transfer->wait(in_seconds(20))) ++unended;
        }));
        if (const auto item = from.service.receive(0)) {
          from.pool->free(item->addresses.data(), item->addresses.size());
        }
      }
      from.pool->free(blocks.data(), blocks.size());
    });
  }
  for (int round = 0; round < kRounds; ++round) {
    usleep(3'000);
    if (round % 2 == 0) {
      pair.a.service.fence("no lease");
      pair.a.service.unfence();
    } else {
      pair.b.service.expel(pair.a.service.incarnation(), "dead");
      pair.b.service.set_members(pair.members);
    }
  }
  stop = true;
  for (std::thread& sender : senders) sender.join();
  CHECK(unended == 0);
  const auto free_received = [](const Node& node) {
    while (const auto item = node.service.receive(0)) node.pool->free(item->addresses.data(), item->addresses.size());
    return blocks_in(*node.pool, BlockState::kFree) == 32;
  };
  // Blocks of a disconnected member may be in quarantine until it connects again.
  send_one(pair.a, pair.b);
  CHECK(soon([&] { return free_received(pair.a) && free_received(pair.b); }));
  CHECK(pair.a.service.peers().size() == 1);
}

TEST_CASE("a service that waits for its id listens, admits no peer, and keeps the id that it gets") {
  constexpr std::uint32_t kGiven = 4711;
  Node a = make_node("a", {}, 16, [](ServiceOptions& options) { options.joins_cluster = true; });
  Node b = make_node("b");
  const std::string where = a.service.listen(unix_address());
  CHECK(a.pool->instance() == 0);
  CHECK(code_of([&] { a.service.connect(b.service.listen(unix_address()), in_seconds(60)); }) == ErrorCode::kFenced);
  CHECK_FALSE(is_let_in(b, where));
  a.service.unfence();  // is another matter
  CHECK_FALSE(is_let_in(b, where));
  CHECK(code_of([&] { a.service.join(0); }) == ErrorCode::kArgument);
  a.service.join(kGiven);
  CHECK(a.pool->instance() == kGiven);
  CHECK(b.service.connect(where, in_seconds(60)) == "a");
  CHECK(b.service.peers()[0].instance == kGiven);
  a.service.join(kGiven);
  CHECK(code_of([&] { a.service.join(kGiven + 1); }) == ErrorCode::kState);
}

TEST_CASE("an id that was given is kept, even when a peer has the same") {
  constexpr std::uint32_t kGiven = 99;
  const auto given = [](ServiceOptions& options) { options.joins_cluster = true; };
  Node a = make_node("a", {}, 16, given);
  Node b = make_node("b", {}, 16, given);
  a.service.join(kGiven);
  b.service.join(kGiven);
  CHECK(code_of([&] { a.service.connect(b.service.listen(unix_address()), in_seconds(60)); }) == ErrorCode::kState);
  CHECK(a.pool->instance() == kGiven);
  CHECK(b.pool->instance() == kGiven);
}

TEST_CASE("a service that did not get into its cluster is dropped, and another one started") {
  Node a = make_node("a", {}, 16, [](ServiceOptions& options) { options.joins_cluster = true; });
  Node b = make_node("b");
  a.service.listen(unix_address());
  a.node->drop_service();
  CHECK(a.node->service() == nullptr);
  CHECK(code_of([&] { static_cast<void>(a.service.receive(0)); }) == ErrorCode::kClosed);
  a.node->drop_service();
  ServiceOptions options;
  options.name = "again";
  options.secret = "s3cret";
  Node again{a.node, a.pool, a.node->start_service(options), "again"};
  CHECK(again.service.connect(b.service.listen(unix_address()), in_seconds(60)) == "b");
  send_one(again, b);
  again.service.disconnect("b");
  CHECK(all_free_soon(*a.pool));
}

TEST_CASE(
    "what was received and never asked for is given up with the service, but for what the application has freed") {
  Node a = make_node("a");
  Node b = make_node("b");
  a.service.connect(b.service.listen(unix_address()), in_seconds(60));
  const Addresses blocks = alloc(*a.pool, 3);
  const auto transfer = a.service.transfer(request_to(b, blocks));
  finish(transfer);
  const Addresses there = transfer->addresses();
  REQUIRE(there.size() == 3);
  b.pool->free(&there[1], 1);
  CHECK(blocks_in(*b.pool, BlockState::kActive) == 2);
  b.node->drop_service();
  CHECK(all_free_soon(*b.pool));
}

}  // namespace
}  // namespace kvpool::testing
