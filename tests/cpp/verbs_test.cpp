// All requests to a peer, over the simulated network and every real route.
#include <algorithm>
#include <array>
#include <cstring>

#include "ways.h"

namespace kvpool::testing {
namespace {

constexpr std::array kTiers = {Medium::kHbm, Medium::kDram};
constexpr std::uint32_t kBlocks = 32;  // of a pool, in both media

void give_up_item(JoinedPair& pair, Node& node) {
  const auto item = pair.receive(node);
  free_all(*node.pool(), item->addresses);
}

TEST_CASE_TEMPLATE("blocks arrive as they were in any medium and by any strategy", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  std::uint64_t first = 100;
  for (const Medium source : kTiers) {
    for (const Medium target : kTiers) {
      for (const Strategy strategy : {Strategy::kAuto, Strategy::kByLayer, Strategy::kByLayerAgg, Strategy::kByRequest,
                                      Strategy::kByRequestAgg}) {
        CAPTURE(strategy_name(strategy));
        const Addresses from = alloc_stamped(*a.pool(), 5, first += 10, source);
        TransferRequest request = pair->request(from);
        request.medium = target;
        request.strategy = strategy;
        request.private_bytes = Bytes(3, std::byte{7});
        const auto transfer = a.transfer(std::move(request));
        pair->finish(*transfer);
        const auto item = pair->receive(b);
        CHECK(item->peer == "a");
        CHECK(item->addresses == transfer->addresses());
        CHECK(item->private_bytes == Bytes(3, std::byte{7}));
        CHECK_FALSE(item->inserted);
        CHECK(are_stamped(*b.pool(), item->addresses, first));
        CHECK(std::all_of(item->addresses.begin(), item->addresses.end(),
                          [&](Address address) { return medium_of(address) == target; }));
        const TransferStats stats = transfer->stats();
        CHECK(stats.route == pair->route());
        CHECK(stats.blocks == 5);
        CHECK(stats.bytes == 5 * a.pool()->layout().block_bytes());
        CHECK(transfer->bytes_done() == stats.bytes);
        CHECK(transfer->bytes_total() == stats.bytes);
        free_all(*b.pool(), item->addresses);
        free_all(*a.pool(), from);
      }
    }
  }
  CHECK(a.count(BlockState::kFree) == kBlocks);
  CHECK(b.count(BlockState::kFree) == kBlocks);
}

TEST_CASE_TEMPLATE("an insertion sends what the receiver does not hold and is matched there", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Tokens tokens = prompt(1, 6);
  const Addresses from = alloc_stamped(*a.pool(), 6, 20);
  std::uint64_t held = 0;
  for (const std::size_t pages : {std::size_t{4}, std::size_t{6}, std::size_t{6}}) {
    CAPTURE(held);
    TransferRequest request = pair->request(Addresses(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(pages)));
    request.insert = true;
    request.tokens = Tokens(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(pages * kPage));
    request.name_space = "tenant";
    const auto transfer = a.transfer(std::move(request));
    pair->finish(*transfer);
    CHECK(transfer->stats().skipped_blocks == held);
    CHECK(transfer->stats().bytes == (pages - held) * a.pool()->layout().block_bytes());
    CHECK(transfer->addresses().size() == pages);
    held = pages;
  }
  const Found found = match(b.pool(), tokens, "tenant");
  CHECK(found.hit.pages == 6);
  CHECK(are_stamped(*b.pool(), found.addresses, 20));
  CHECK(match(b.pool(), tokens).hit.pages == 0);  // of another namespace
  CHECK(b.next_received() == nullptr);            // no one asked to notify the application
  CHECK(b.count(BlockState::kHistorical) == 6);
  CHECK(b.count(BlockState::kReserved) == 0);
}

TEST_CASE_TEMPLATE("what came in another way meanwhile is not kept twice", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  TransferRequest request = pair->request(alloc_stamped(*a.pool(), 3, 30));
  request.insert = true;
  request.tokens = prompt(1, 3);
  request.streamed = true;
  request.private_bytes = Bytes{};
  const auto transfer = a.transfer(std::move(request));
  REQUIRE(pair->eventually([&] { return b.count(BlockState::kReserved) == 3; }));
  const Addresses first = alloc_stamped(*b.pool(), 2, 30);
  static_cast<void>(insert(b.pool(), prompt(1, 2), first));
  transfer->send_layer(0);
  transfer->send_layer(1);
  transfer->finish();
  pair->finish(*transfer);
  CHECK(Addresses(transfer->addresses().begin(), transfer->addresses().begin() + 2) == first);
  CHECK(b.count(BlockState::kHistorical) == 3);
  CHECK(b.count(BlockState::kFree) == kBlocks - 3);
  auto item = pair->receive(b);
  CHECK(item->inserted);
  CHECK(item->tokens == prompt(1, 3));
  CHECK(item->addresses == transfer->addresses());
  CHECK(are_stamped(*b.pool(), item->addresses, 30));
  CHECK(b.pool()->evict(8, kMixed) == 0);  // the application's, until it closes the item
  item.reset();
  CHECK(b.pool()->evict(8, kMixed) == 3);
}

TEST_CASE_TEMPLATE("lent blocks are written without a word and fetched from and given back", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses lent = a.borrow(4, Medium::kHbm);
  CHECK(b.count(BlockState::kLent) == 4);
  for (const std::uint64_t first : {40, 50}) {
    const Addresses from = alloc_stamped(*a.pool(), 4, first);
    TransferRequest request = pair->request(from);
    request.to = lent;
    const auto transfer = a.transfer(std::move(request));
    pair->finish(*transfer);
    CHECK(transfer->addresses() == lent);
    free_all(*a.pool(), from);

    const Addresses back = alloc(*a.pool(), 4, Medium::kDram);
    const auto fetch = a.fetch(pair->fetch_request(lent, back));
    pair->finish(*fetch);
    CHECK(fetch->addresses() == back);
    CHECK(are_stamped(*a.pool(), back, first));
    free_all(*a.pool(), back);
  }
  CHECK(b.next_received() == nullptr);
  CHECK(are_stamped(*b.pool(), lent, 50));
  a.give_back(lent);
  CHECK(b.count(BlockState::kFree) == kBlocks);
  CHECK(code_of([&] {
          TransferRequest request = pair->request(alloc(*a.pool(), 4));
          request.to = lent;
          a.transfer(std::move(request));
        }) == ErrorCode::kNotOwner);
}

TEST_CASE_TEMPLATE("lent blocks that are inserted are the receiver's", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses lent = a.borrow(2, Medium::kDram);
  TransferRequest request = pair->request(alloc_stamped(*a.pool(), 2, 60));
  request.to = lent;
  request.insert = true;
  request.tokens = prompt(2, 2);
  const auto transfer = a.transfer(std::move(request));
  pair->finish(*transfer);
  CHECK(transfer->addresses() == lent);
  const Found found = match(b.pool(), prompt(2, 2));
  CHECK(found.addresses == lent);
  CHECK(are_stamped(*b.pool(), lent, 60));
  CHECK(b.count(BlockState::kLent) == 0);
  CHECK(code_of([&] {
          TransferRequest again = pair->request(alloc(*a.pool(), 2));
          again.to = lent;
          a.transfer(std::move(again));
        }) == ErrorCode::kNotOwner);
}

TEST_CASE_TEMPLATE("private bytes arrive with reserved and with lent blocks", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses from = alloc_stamped(*a.pool(), 1, 70);
  const Addresses lent = a.borrow(1, Medium::kHbm);
  for (const std::size_t n : {std::size_t{0}, std::size_t{9}, kPrivateBytesMax}) {
    for (const bool named : {false, true}) {
      CAPTURE(n);
      CAPTURE(named);
      Bytes bytes(n);
      for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>(i * 31);
      TransferRequest request = pair->request(from);
      if (named) request.to = lent;
      request.private_bytes = bytes;
      const auto transfer = a.transfer(std::move(request));
      pair->finish(*transfer);
      const auto item = pair->receive(b);
      CHECK((item->private_bytes == bytes));
      CHECK(item->addresses == transfer->addresses());
      CHECK(are_stamped(*b.pool(), item->addresses, 70));
      if (!named) free_all(*b.pool(), item->addresses);
    }
  }
  TransferRequest request = pair->request(from);
  request.private_bytes = Bytes(kPrivateBytesMax + 1);
  CHECK(code_of([&] { a.transfer(std::move(request)); }) == ErrorCode::kArgument);
  a.give_back(lent);
  CHECK(b.count(BlockState::kFree) == kBlocks);
}

TEST_CASE_TEMPLATE("layers are sent as they are computed", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses lent = a.borrow(3, Medium::kHbm);
  for (const Strategy strategy : {Strategy::kByLayer, Strategy::kByLayerAgg}) {
    for (const bool named : {false, true}) {
      CAPTURE(strategy_name(strategy));
      CAPTURE(named);
      const Addresses from = alloc_stamped(*a.pool(), 3, 1);
      TransferRequest request = pair->request(from);
      if (named) request.to = lent;
      request.strategy = strategy;
      request.streamed = true;
      request.checksum = true;
      const auto transfer = a.transfer(std::move(request));
      for (std::size_t i = 0; i < from.size(); ++i) stamp(*a.pool(), from[i], 80 + i);  // nothing was sent yet
      transfer->send_layer(1);
      CHECK(code_of([&] { transfer->send_layer(1); }) == ErrorCode::kArgument);
      CHECK(code_of([&] { transfer->send_layer(2); }) == ErrorCode::kArgument);
      CHECK(code_of([&] { transfer->finish(); }) == ErrorCode::kState);
      const std::uint64_t half = 3 * a.pool()->layout().block_bytes() / 2;
      REQUIRE(pair->eventually([&] { return transfer->stats().bytes == half; }));
      CHECK_FALSE(transfer->done());
      transfer->send_layer(0);
      transfer->finish();
      pair->finish(*transfer);
      CHECK(transfer->stats().strategy == std::string(strategy_name(strategy)));
      CHECK(are_stamped(*b.pool(), transfer->addresses(), 80));
      free_all(*a.pool(), from);
      if (!named) free_all(*b.pool(), transfer->addresses());
    }
  }
  const auto plain = a.transfer(pair->request(alloc(*a.pool(), 1)));
  CHECK(code_of([&] { plain->send_layer(0); }) == ErrorCode::kState);
  CHECK(code_of([&] { plain->finish(); }) == ErrorCode::kState);
  pair->finish(*plain);
}

TEST_CASE_TEMPLATE("active and cached blocks are fetched as they are and stale ones are not", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  Addresses theirs = alloc_stamped(*b.pool(), 2, 90, Medium::kDram);
  const Addresses cached = alloc_stamped(*b.pool(), 2, 92);
  static_cast<void>(insert(b.pool(), prompt(3, 2), cached));
  theirs.insert(theirs.end(), cached.begin(), cached.end());
  const Addresses mine = alloc(*a.pool(), 4);
  pair->finish(*a.fetch(pair->fetch_request(theirs, mine)));
  CHECK(are_stamped(*a.pool(), mine, 90));
  CHECK(a.count(BlockState::kActive) == 4);
  CHECK(b.count(BlockState::kActive) == 2);
  CHECK(b.next_received() == nullptr);

  CHECK(b.pool()->evict(2, kMixed) == 2);
  const auto stale = pair->end_of(*a.fetch(pair->fetch_request(theirs, mine)));
  REQUIRE(stale);
  CHECK(stale->code() == ErrorCode::kStaleAddress);
  CHECK(are_stamped(*a.pool(), mine, 90));
  CHECK(code_of([&] { a.fetch(pair->fetch_request(mine, theirs)); }) == ErrorCode::kNotOwner);
  free_all(*a.pool(), mine);
  CHECK(a.count(BlockState::kFree) == kBlocks);
}

TEST_CASE_TEMPLATE("blocks that are freed while they are sent are not reused before", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses from = alloc_stamped(*a.pool(), 16, 110);
  TransferRequest request = pair->request(from);
  request.streamed = true;
  const auto transfer = a.transfer(std::move(request));
  free_all(*a.pool(), from);
  CHECK(code_of([&] { alloc(*a.pool(), 1); }) == ErrorCode::kOutOfBlocks);
  transfer->send_layer(0);
  transfer->send_layer(1);
  transfer->finish();
  pair->finish(*transfer);
  CHECK(are_stamped(*b.pool(), transfer->addresses(), 110));
  CHECK(pair->eventually([&] { return a.count(BlockState::kFree) == kBlocks; }));
}

TEST_CASE_TEMPLATE("both sides send at once", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses ours = alloc_stamped(*a.pool(), 4, 130);
  const Addresses theirs = alloc_stamped(*b.pool(), 4, 140);
  for (int round = 0; round < 5; ++round) {
    TransferRequest request = pair->request(ours);
    TransferRequest back = pair->request(theirs);
    request.private_bytes = back.private_bytes = Bytes(1);
    const auto to_b = a.transfer(std::move(request));
    const auto to_a = b.transfer(std::move(back));
    pair->finish(*to_b);
    pair->finish(*to_a);
    CHECK(are_stamped(*b.pool(), to_b->addresses(), 130));
    CHECK(are_stamped(*a.pool(), to_a->addresses(), 140));
    give_up_item(*pair, b);
    give_up_item(*pair, a);
  }
  CHECK(a.count(BlockState::kActive) == 4);
  CHECK(b.count(BlockState::kActive) == 4);
}

}  // namespace
}  // namespace kvpool::testing
