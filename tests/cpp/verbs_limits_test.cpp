// How requests to a peer fail: cancelled, too late, refused, damaged. Over the simulated network and
// every real route.
#include "ways.h"

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kBlocks = 32;  // of a pool, in both media

ErrorCode code_of_end(JoinedPair& pair, Transfer& transfer) {
  const auto error = pair.end_of(transfer);
  REQUIRE(error);
  return error->code();
}

// It waits for its next layer, with its blocks reserved.
std::shared_ptr<Transfer> open_stream(JoinedPair& pair, const Addresses& from, const Addresses& to = {}) {
  TransferRequest request = pair.request(from);
  request.to = to;
  request.streamed = true;
  auto transfer = pair.a().transfer(std::move(request));
  if (to.empty()) {
    REQUIRE(pair.eventually([&] { return pair.b().count(BlockState::kReserved) == from.size(); }));
  }
  return transfer;
}

TEST_CASE_TEMPLATE("a transfer that is cancelled between two layers leaves nothing", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses from = alloc_stamped(*a.pool(), 3, 10);
  for (const bool begun : {false, true}) {
    const auto transfer = open_stream(*pair, from);
    if (begun) transfer->send_layer(0);
    CHECK_FALSE(transfer->done());
    CHECK(transfer->cancel());
    CHECK(code_of_end(*pair, *transfer) == ErrorCode::kCancelled);
    CHECK_FALSE(transfer->cancel());
    CHECK(code_of([&] { transfer->send_layer(1); }) == ErrorCode::kCancelled);
    CHECK(pair->eventually([&] { return b.count(BlockState::kFree) == kBlocks; }));
  }
  pair->finish(*a.transfer(pair->request(from)));  // the pair goes on
}

TEST_CASE_TEMPLATE("a transfer that is cancelled at any moment has arrived or leaves nothing", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses from = alloc_stamped(*a.pool(), 8, 20);
  const Addresses lent = a.borrow(8, Medium::kDram);
  int cancelled = 0;
  int arrived = 0;
  for (int moment = 0; moment < 60; ++moment) {
    const bool named = moment % 3 == 2;
    CAPTURE(moment);
    TransferRequest request = pair->request(from);
    if (named) request.to = lent;
    request.private_bytes = Bytes(1);
    request.checksum = moment % 2 == 0;
    const auto transfer = a.transfer(std::move(request));
    pair->live(pair->now_ns() + moment * 20'000, [&] { return transfer->done(); });
    const bool was_in_time = transfer->cancel();
    const auto error = pair->end_of(*transfer);
    CHECK(was_in_time == error.has_value());
    if (error) {
      CHECK(error->code() == ErrorCode::kCancelled);
      ++cancelled;
      CHECK(pair->eventually([&] { return b.count(BlockState::kFree) == kBlocks - 8; }));
      CHECK(b.next_received() == nullptr);
    } else {
      ++arrived;
      const auto item = pair->receive(b);
      CHECK(are_stamped(*b.pool(), item->addresses, 20));
      if (!named) free_all(*b.pool(), item->addresses);
    }
  }
  if (!Way::kReal) CHECK(std::min(cancelled, arrived) > 5);  // in virtual time the moments are what they are
  a.give_back(lent);
  CHECK(b.count(BlockState::kFree) == kBlocks);
  free_all(*a.pool(), from);
  CHECK(a.count(BlockState::kFree) == kBlocks);
}

TEST_CASE_TEMPLATE("a fetch that is cancelled at any moment has arrived or gives its blocks back", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses theirs = alloc_stamped(*b.pool(), 8, 30);
  for (int moment = 0; moment < 40; ++moment) {
    CAPTURE(moment);
    const Addresses mine = alloc(*a.pool(), 8);
    const auto fetch = a.fetch(pair->fetch_request(theirs, mine));
    pair->live(pair->now_ns() + moment * 20'000, [&] { return fetch->done(); });
    static_cast<void>(fetch->cancel());
    if (const auto error = pair->end_of(*fetch)) {
      CHECK(error->code() == ErrorCode::kCancelled);
    } else {
      CHECK(are_stamped(*a.pool(), mine, 30));
    }
    free_all(*a.pool(), mine);
  }
  CHECK(pair->eventually([&] { return a.count(BlockState::kFree) == kBlocks; }));
  free_all(*b.pool(), theirs);  // no one reads them any more
  CHECK(pair->eventually([&] { return b.count(BlockState::kFree) == kBlocks; }));
}

TEST_CASE_TEMPLATE("the deadline ends a transfer whose next layer does not come", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses from = alloc_stamped(*a.pool(), 2, 40);
  const Addresses lent = a.borrow(2, Medium::kHbm);
  for (const bool named : {false, true}) {
    CAPTURE(named);
    TransferRequest request = pair->request(from);
    if (named) request.to = lent;
    request.streamed = true;
    request.deadline_ns = pair->in_seconds(0.1);
    const auto transfer = a.transfer(std::move(request));
    if (const auto late = error_of([&] { transfer->send_layer(1); })) CHECK(late->code() == ErrorCode::kDeadline);
    CHECK(code_of_end(*pair, *transfer) == ErrorCode::kDeadline);
    CHECK(pair->eventually([&] { return b.count(BlockState::kFree) == kBlocks - 2; }));
  }
  TransferRequest request = pair->request(from);
  request.to = lent;
  pair->finish(*a.transfer(std::move(request)));  // lent blocks still are
  CHECK(are_stamped(*b.pool(), lent, 40));
}

// In virtual time only. The receiver used to take its blocks back after 30 s.
TEST_CASE_TEMPLATE("a transfer that takes 40 of its 60 seconds arrives", Way, SimDirect, SimPlaced) {
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses from = alloc_stamped(*a.pool(), 3, 60);
  TransferRequest request = pair->request(from);
  request.streamed = true;
  request.deadline_ns = pair->in_seconds(60);
  const auto transfer = a.transfer(std::move(request));
  transfer->send_layer(0);
  CHECK_FALSE(pair->live(pair->in_seconds(40), [&] { return transfer->done(); }));
  CHECK(b.count(BlockState::kReserved) == from.size());
  transfer->send_layer(1);
  transfer->finish();
  pair->finish(*transfer);
  CHECK(are_stamped(*b.pool(), pair->receive(b)->addresses, 60));
}

TEST_CASE_TEMPLATE("a full receiver says so and both sides are unchanged", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses theirs = alloc_stamped(*b.pool(), 14, 50);
  const Addresses from = alloc_stamped(*a.pool(), 3, 70);
  for (const bool insert : {false, true}) {
    TransferRequest request = pair->request(from);
    request.insert = insert;
    if (insert) request.tokens = prompt(1, 3);
    const auto error = pair->end_of(*a.transfer(std::move(request)));
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kOutOfBlocks);
    const auto field = [&](const char* name) {
      for (const ErrorField& one : error->fields()) {
        if (std::string(one.first) == name) return one.second;
      }
      return std::int64_t{-1};
    };
    CHECK(field("requested") == 3);
    CHECK(field("free") == 2);
    CHECK(field("capacity") == 16);
  }
  CHECK(code_of([&] { static_cast<void>(a.borrow(3, Medium::kHbm)); }) == ErrorCode::kOutOfBlocks);
  CHECK(are_stamped(*b.pool(), theirs, 50));
  CHECK(are_stamped(*a.pool(), from, 70));
  CHECK(b.count(BlockState::kFree) == kBlocks - 14);
  CHECK(a.count(BlockState::kActive) == 3);
  CHECK(b.next_received() == nullptr);
}

TEST_CASE_TEMPLATE("cached prompts are evicted only if the request allows it", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join({.dram_blocks = 0});
  Node& a = pair->a();
  Node& b = pair->b();
  static_cast<void>(insert(b.pool(), prompt(9, 16), alloc(*b.pool(), 16)));
  const Addresses from = alloc_stamped(*a.pool(), 2, 80);
  for (const bool may : {false, true}) {
    TransferRequest request = pair->request(from);
    request.may_evict = may;
    const auto transfer = a.transfer(std::move(request));
    const auto error = pair->end_of(*transfer);
    CHECK(error.has_value() == !may);
    if (error) CHECK(error->code() == ErrorCode::kOutOfBlocks);
    if (!error) CHECK(are_stamped(*b.pool(), transfer->addresses(), 80));
    CHECK(b.count(BlockState::kHistorical) == (may ? 14 : 16));
  }
}

TEST_CASE_TEMPLATE("a peer with too much in progress is told when to try again", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join({.transfers_max = 2, .reserved_max = 4, .received_max = 1});
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses from = alloc_stamped(*a.pool(), 3, 90);
  const Addresses one(from.begin(), from.begin() + 1);
  const auto busy = [&](TransferRequest&& request) {
    std::optional<Error> error;
    try {
      error = pair->end_of(*a.transfer(std::move(request)));
    } catch (const Error& thrown) {  // by this side's own limit
      error = thrown;
    }
    return error && error->code() == ErrorCode::kBusy;
  };
  SUBCASE("blocks") {
    const Addresses lent = a.borrow(2, Medium::kHbm);
    CHECK(busy(pair->request(from)));
    CHECK(code_of([&] { static_cast<void>(a.borrow(3, Medium::kHbm)); }) == ErrorCode::kBusy);
    a.give_back(lent);
    pair->finish(*a.transfer(pair->request(from)));
  }
  SUBCASE("transfers") {
    const auto first = open_stream(*pair, one);
    TransferRequest request = pair->request(one);
    request.streamed = true;
    const auto second = a.transfer(std::move(request));
    CHECK(busy(pair->request(one)));
    for (const auto& transfer : {first, second}) {
      CHECK(transfer->cancel());
      CHECK(code_of_end(*pair, *transfer) == ErrorCode::kCancelled);
    }
    pair->finish(*a.transfer(pair->request(one)));
  }
  SUBCASE("an item that its application did not ask for") {
    const auto told = [&] {
      TransferRequest request = pair->request(one);
      request.private_bytes = Bytes(1);
      return request;
    };
    pair->finish(*a.transfer(told()));
    CHECK(busy(told()));
    CHECK(pair->eventually([&] { return b.count(BlockState::kActive) == 1; }));
    CHECK(b.count(BlockState::kReserved) == 0);
    CHECK(pair->receive(b) != nullptr);
    pair->finish(*a.transfer(told()));
  }
}

TEST_CASE_TEMPLATE("a change after sending is found by the checksum", Way, KVPOOL_WAYS) {
  if (!Way::here()) return;
  const auto pair = Way::join();
  Node& a = pair->a();
  Node& b = pair->b();
  const Addresses lent = a.borrow(2, Medium::kHbm);
  for (const bool named : {false, true}) {
    CAPTURE(named);
    const Addresses from = alloc_stamped(*a.pool(), 2, 120);
    TransferRequest request = pair->request(from);
    if (named) request.to = lent;
    request.streamed = true;
    request.checksum = true;
    request.private_bytes = Bytes(1);
    const auto transfer = a.transfer(std::move(request));
    transfer->send_layer(0);
    const std::uint64_t half = a.pool()->layout().block_bytes();  // of two blocks
    REQUIRE(pair->eventually([&] { return transfer->stats().bytes == half; }));
    stamp(*a.pool(), from[0], 121);  // the sender breaks its word that the layer is complete
    transfer->send_layer(1);
    transfer->finish();
    CHECK(code_of_end(*pair, *transfer) == ErrorCode::kProtocol);
    CHECK(b.next_received() == nullptr);
    CHECK(pair->eventually([&] { return b.count(BlockState::kFree) == kBlocks - 2; }));
    free_all(*a.pool(), from);
  }
  a.give_back(lent);
}

}  // namespace
}  // namespace kvpool::testing
