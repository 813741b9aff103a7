// Matches at a peer, and fetches of what they find, over the simulated network and every real route.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "ways.h"

namespace kvpool::testing {
namespace {

void await_match(JoinedPair& pair, PeerMatch& match) {
  REQUIRE(match.wait(pair.in_seconds(20)));
  const auto error = error_of([&] { match.rethrow_if_failed(); });
  REQUIRE_MESSAGE(!error, std::string(error ? error->what() : ""));
}

TEST_CASE_TEMPLATE("what a peer has matched stays there until it has fetched it", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Tokens tokens = prompt(1, 6);
  Addresses there = alloc_stamped(*b.pool(), 2, 20);
  const Addresses dram = alloc_stamped(*b.pool(), 3, 22, Medium::kDram);
  there.insert(there.end(), dram.begin(), dram.end());
  static_cast<void>(insert(b.pool(), Tokens(tokens.begin(), tokens.begin() + 5 * kPage), there));
  const auto match = a.match_at(pair->match_request(tokens));
  await_match(*pair, *match);
  CHECK(match->addresses().size() == 5);
  CHECK(b.pool()->evict(16, kMixed) == 0);
  const Addresses here = alloc(*a.pool(), 5);
  const auto fetch = a.fetch(pair->fetch_request(match->addresses(), here));
  pair->finish(*fetch);
  CHECK(are_stamped(*a.pool(), here, 20));
  CHECK_FALSE(match->closed());
  match->close();
  CHECK(pair->eventually([&] { return b.pool()->evict(16, kMixed) > 0; }));
  free_all(*a.pool(), here);
}

TEST_CASE_TEMPLATE("a prompt is fetched into the index by any way but for what is there", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const auto pages = [](Token id, std::size_t n) { return prompt(id, n); };
  static_cast<void>(insert(b.pool(), pages(1, 6), alloc_stamped(*b.pool(), 6, 20), "tenant"));
  const auto fetched = [&](std::size_t n, Medium medium) {
    PromptFetchRequest request = pair->prompt_request(pages(1, n), medium);
    request.name_space = "tenant";
    const auto fetch = a.fetch_prompt(std::move(request));
    pair->finish(*fetch);
    const Found found = match(a.pool(), pages(1, 8), "tenant");
    CHECK(found.addresses == fetch->addresses());
    CHECK(are_stamped(*a.pool(), found.addresses, 20));
    return fetch->stats();
  };
  TransferStats stats = fetched(2, Medium::kDram);
  CHECK(stats.blocks == 2);
  CHECK(stats.skipped_blocks == 0);
  CHECK(stats.bytes == 2 * a.pool()->layout().block_bytes());
  stats = fetched(8, Medium::kHbm);  // of which the peer has six, and two are here
  CHECK(stats.blocks == 6);
  CHECK(stats.skipped_blocks == 2);
  CHECK(stats.bytes == 4 * a.pool()->layout().block_bytes());
  stats = fetched(8, Medium::kHbm);  // nothing more
  CHECK(stats.skipped_blocks == 6);
  CHECK(stats.bytes == 0);
  CHECK(a.count(BlockState::kHistorical) == 6);
  CHECK(a.count(BlockState::kReserved) == 0);
  static_cast<void>(a.pool()->evict(16, kMixed));  // nothing is left pinned on either side
  CHECK(a.count(BlockState::kFree) == 32);
  CHECK(pair->eventually([&] { return b.pool()->evict(16, kMixed) == 6; }));
}

TEST_CASE_TEMPLATE("a message without blocks reaches the application", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  TransferRequest request = pair->request({});
  request.private_bytes = Bytes(3, std::byte{7});
  const auto transfer = pair->a().transfer(std::move(request));
  pair->finish(*transfer);
  CHECK(transfer->addresses().empty());
  CHECK(transfer->stats().bytes == 0);
  const auto item = pair->receive(pair->b());
  CHECK(item->addresses.empty());
  CHECK(item->private_bytes == Bytes(3, std::byte{7}));
  TransferRequest silent = pair->request({});
  CHECK(code_of([&] { pair->a().transfer(std::move(silent)); }) == ErrorCode::kArgument);
  TransferRequest prompted = pair->request({});
  prompted.private_bytes = Bytes(3);
  prompted.insert = true;
  CHECK(code_of([&] { pair->a().transfer(std::move(prompted)); }) == ErrorCode::kArgument);
}

// Each makes room for what it fetches by evicting, and evicts nothing that the other is reading.
TEST_CASE("two full pools fetch prompts from each other at the same time, and nobody waits for ever") {
  const auto pair = SockUnix::join({.hbm_blocks = 24, .dram_blocks = 1});
  const auto fill = [](Node& node, Token first) {
    for (Token id = first; id < first + 6; ++id) {
      static_cast<void>(insert(node.pool(), prompt(id, 4), alloc_stamped(*node.pool(), 4, id * 100U)));
    }
  };
  fill(pair->a(), 0);
  fill(pair->b(), 50);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&, n] {
      Node& node = n % 2 == 0 ? pair->a() : pair->b();
      for (int round = 0; round < 100; ++round) {
        const Token id = (n % 2 == 0 ? 50 : 0) + (round * 5 + n) % 6;
        const auto fetch = node.fetch_prompt(pair->prompt_request(prompt(id, 4)));
        if (round % 7 == 0) fetch->cancel();
        if (!fetch->wait(pair->in_seconds(30))) ++wrong;
        const auto error = error_of([&] { fetch->rethrow_if_failed(); });
        if (error && error->code() != ErrorCode::kOutOfBlocks && error->code() != ErrorCode::kCancelled) ++wrong;
        const Found found = match(node.pool(), prompt(id, 4));
        if (!are_stamped(*node.pool(), found.addresses, id * 100U)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  for (Node* node : {&pair->a(), &pair->b()}) {
    CHECK(pair->eventually([&] {
      node->pool()->evict(64, kMixed);
      return node->count(BlockState::kFree) == 25;
    }));
  }
}

TEST_CASE_TEMPLATE("a hold that its peer forgets ends at its deadline", Way, SimDirect, SockTcp) {
  const auto pair = Way::join();
  Node& b = pair->b();
  static_cast<void>(insert(b.pool(), prompt(1, 3), alloc_stamped(*b.pool(), 3, 20)));
  const auto match = pair->a().match_at(pair->match_request(prompt(1, 3), /*hold_seconds=*/0.02));
  await_match(*pair, *match);
  CHECK(pair->eventually([&] { return b.pool()->evict(16, kMixed) == 3; }));
  CHECK(match->closed());
}

TEST_CASE("two pools ask each other from many threads, and every hold ends") {
  const auto pair = SockUnix::join({.hbm_blocks = 64, .dram_blocks = 16});
  for (Node* node : {&pair->a(), &pair->b()}) {
    for (Token id = 0; id < 8; ++id) {
      static_cast<void>(insert(node->pool(), prompt(id, 4), alloc(*node->pool(), 4)));
    }
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&, n] {
      Node& node = n % 2 == 0 ? pair->a() : pair->b();
      for (int round = 0; round < 200; ++round) {
        const auto match = node.match_at(pair->match_request(prompt(round % 10, 4)));
        if (round % 3 == 0) match->close();  // before or after the answer
        if (round % 5 == 0) continue;
        if (!match->wait(pair->in_seconds(20))) ++wrong;
        if (round % 3 == 0) continue;
        if (match->addresses().size() != (round % 10 < 8 ? 4U : 0U)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  for (Node* node : {&pair->a(), &pair->b()}) {
    std::size_t evicted = 0;
    CHECK(pair->eventually([&] { return (evicted += node->pool()->evict(64, kMixed)) == 32; }));
  }
}

}  // namespace
}  // namespace kvpool::testing
