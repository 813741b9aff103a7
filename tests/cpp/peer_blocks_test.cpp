// A pool's blocks as sessions use them.
#include "kvpool/peers/peer_blocks.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "failing_alloc.h"
#include "fuzz_seeds.h"
#include "kvpool/base/digest.h"
#include "kvpool/pool/peer_claims.h"
#include "pool_fixture.h"
#include "soon.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr Writer kWriter{0x1235, 6};

struct Kit {
  explicit Kit(std::uint32_t hbm = 8, std::uint32_t dram = 4, std::uint32_t received_max = 2)
      : pool(std::make_shared<Pool>(small_options(hbm, dram))), received(received_max), blocks(*pool, received) {
    pool->set_instance(7);
  }
  std::uint32_t count(BlockState state) {
    return pool->audit().media[Medium::kHbm].by_state[static_cast<std::size_t>(state)];
  }
  void deliver(Delivery&& delivery) {
    Delivered delivered = blocks.deliver(std::move(delivery));
    REQUIRE(delivered.news != nullptr);
    blocks.publish(std::move(delivered.news));
  }
  Delivery delivery(std::size_t n, bool insert) {
    Delivery delivery;
    delivery.peer = "peer";
    delivery.spec.blocks = n;
    delivery.spec.insert = insert;
    if (insert) delivery.spec.tokens = prompt(1, n);
    delivery.reservation = *blocks.reserve(delivery.spec, kWriter, Room::kFree);
    delivery.private_bytes = Bytes(2, std::byte{1});
    return delivery;
  }
  // Of blocks that are lent to kWriter.
  Delivery named(std::size_t n, bool insert, Token id = 1) {
    Delivery delivery;
    delivery.peer = "peer";
    delivery.named = true;
    delivery.spec.blocks = n;
    delivery.spec.insert = insert;
    if (insert) delivery.spec.tokens = prompt(id, n);
    delivery.reservation.addresses = *blocks.lend(n, Medium::kHbm, {kWriter.incarnation, 0}, Room::kEvict);
    delivery.private_bytes = Bytes(2, std::byte{1});
    return delivery;
  }
  std::shared_ptr<Pool> pool;
  ReceivedQueue received;
  PeerBlocks blocks;
};

TEST_CASE("incarnation and transfer decide who may write a reserved block") {
  Kit kit;
  ReserveSpec spec;
  spec.blocks = 2;
  const Addresses reserved = kit.blocks.reserve(spec, kWriter, Room::kFree)->addresses;
  const Addresses lent = *kit.blocks.lend(1, Medium::kHbm, kWriter, Room::kFree);
  const Writer other_transfer{kWriter.incarnation, kWriter.mark + 1};
  const Writer other_peer{kWriter.incarnation + 2, kWriter.mark};
  const auto check = [&](const Addresses& addresses, Writer writer) {
    return code_of([&] { kit.blocks.check_reserved(addresses, writer); });
  };
  CHECK_FALSE(check(reserved, kWriter));
  CHECK(check(reserved, other_transfer) == ErrorCode::kNotOwner);
  CHECK(check(reserved, other_peer) == ErrorCode::kNotOwner);
  CHECK(check(lent, kWriter) == ErrorCode::kNotOwner);
  CHECK(check(lent, {kWriter.incarnation, 0}) == ErrorCode::kNotOwner);
  kit.blocks.release(lent);
  kit.blocks.quarantine(reserved);
  CHECK(check(reserved, kWriter) == ErrorCode::kNotOwner);
  kit.blocks.release(reserved);
  CHECK(check(reserved, kWriter) == ErrorCode::kStaleAddress);
  CHECK(kit.count(BlockState::kFree) == 8);
}

// The id used to be looked at before the lock: set_instance() in between left an address without it in the index, which
// the application then gave to peers.
TEST_CASE("a block that arrives is cached under the address that the pool gives out at that moment") {
  const auto pool = std::make_shared<Pool>(small_options(8, 4));
  ReceivedQueue received(2);
  PeerBlocks blocks(*pool, received);
  pool->accept_instance(7);
  Addresses arrived = *blocks.lend(1, Medium::kHbm, {kWriter.incarnation, 0}, Room::kFree);
  CHECK(instance_of(arrived[0]) == 7);  // as peers see it
  std::uint32_t instance = 0;
  SUBCASE("the application does not see the id yet, and the pool may take it back") {}
  SUBCASE("the application sees the id since a moment ago") {
    arrived[0] = without_instance(arrived[0]);
    pool->set_instance(7);
    instance = 7;
  }
  const Tokens tokens = prompt(1, 1);
  Addresses cached(1);
  const InsertItem item{tokens.data(), tokens.size(), arrived.data(), 1, cached.data()};
  const IndexPin pin = pool->for_peers().insert_arrived("", item, arrived);
  CHECK(instance_of(cached[0]) == instance);
  CHECK(instance_of(match(pool, tokens).addresses.at(0)) == instance);
  pool->unpin(&pin, 1);
}

TEST_CASE("blocks are evicted for a peer only if that is allowed, and only by a thread that may") {
  Kit kit(2, 0);
  const Addresses cached = alloc(*kit.pool, 2);
  static_cast<void>(insert(kit.pool, prompt(1, 2), cached));
  CHECK_FALSE(kit.blocks.lend(1, Medium::kHbm, kWriter, Room::kTry).has_value());
  CHECK(code_of([&] { kit.blocks.lend(1, Medium::kHbm, kWriter, Room::kFree); }) == ErrorCode::kOutOfBlocks);
  CHECK(kit.count(BlockState::kHistorical) == 2);
  CHECK(kit.blocks.lend(1, Medium::kHbm, kWriter, Room::kEvict)->size() == 1);
  CHECK(code_of([&] { kit.blocks.lend(3, Medium::kHbm, kWriter, Room::kEvict); }) == ErrorCode::kOutOfBlocks);
}

// Eviction used to count on blocks that transfers still read, and ended the process.
TEST_CASE("a cached block that is read does not count as room, and evicting it does no harm") {
  for (const std::uint32_t dram : {0U, 1U, 4U}) {
    Kit kit(4, dram);
    const Addresses cached = alloc(*kit.pool, 4);
    for (Token id = 0; id < 4; ++id)
      static_cast<void>(insert(kit.pool, prompt(id, 1), {cached[static_cast<std::size_t>(id)]}));
    kit.blocks.hold_for_reading({&cached[1], 2}, 0);
    for (std::size_t i = 1; i <= 2; ++i) stamp(*kit.pool, cached[i], i);
    CHECK(code_of([&] { kit.blocks.lend(4, Medium::kHbm, kWriter, Room::kEvict); }) == ErrorCode::kOutOfBlocks);
    kit.pool->evict(4, Medium::kHbm);
    const Addresses two = *kit.blocks.lend(2, Medium::kHbm, kWriter, Room::kEvict);
    for (const Address address : two) stamp(*kit.pool, address, 99);
    for (std::size_t i = 1; i <= 2; ++i) CHECK(has_stamp(*kit.pool, cached[i], i));
    CHECK(code_of([&] { kit.blocks.hold_for_reading({&cached[1], 1}, 0); }) == ErrorCode::kState);
    kit.blocks.release_reading({&cached[1], 2});
    CHECK(kit.count(BlockState::kFree) == 2);
  }
}

TEST_CASE("expected destinations belong to nobody else until the writes have ended") {
  Kit kit;
  const Addresses to = alloc(*kit.pool, 2);
  kit.blocks.expect_writes(to, kWriter);
  CHECK(code_of([&] { kit.pool->free(to.data(), 1); }) == ErrorCode::kState);
  CHECK(code_of([&] { kit.blocks.expect_writes(to, kWriter); }) == ErrorCode::kState);
  CHECK(code_of([&] { kit.blocks.hold_for_reading(to, 0); }) == ErrorCode::kState);
  kit.blocks.end_writes(to);
  kit.pool->free(to.data(), 2);
  CHECK(kit.count(BlockState::kFree) == 8);
}

TEST_CASE("a checksum covers the blocks' contents in order, whatever their order in memory") {
  Kit kit;
  const Addresses blocks = alloc(*kit.pool, 3);
  for (std::size_t i = 0; i < 3; ++i) stamp(*kit.pool, blocks[i], i + 1);
  std::vector<std::uint64_t> content;
  for (const std::uint64_t value : {3U, 1U}) content.insert(content.end(), 16, value);
  CHECK(kit.blocks.checksum(Addresses{blocks[2], blocks[0]}) == crc32c(0, content.data(), content.size() * 8));
}

TEST_CASE("a delivery that runs out of memory, or of room in the queue, has changed nothing") {
  for (const bool insert : {false, true}) {
    int attempts = 0;
    fail_each_allocation([&](auto&& fail) {
      ++attempts;
      Kit kit;
      Delivery delivery = kit.delivery(3, insert);
      const Addresses blocks = delivery.reservation.addresses;
      if (!fail([&] { static_cast<void>(kit.blocks.deliver(std::move(delivery))); })) return;
      CHECK(kit.count(BlockState::kReserved) == 3);
      CHECK(delivery.reservation.addresses == blocks);
      CHECK_NOTHROW(kit.blocks.check_reserved(blocks, kWriter));
      CHECK(kit.received.pop(0) == nullptr);
      kit.deliver(std::move(delivery));
      CHECK(kit.received.pop(0)->addresses.size() == 3);
    });
    CHECK(attempts > 3);
  }
  Kit kit(8, 4, /*received_max=*/1);
  kit.deliver(kit.delivery(1, false));
  Delivery second = kit.delivery(1, true);
  CHECK(code_of([&] { kit.blocks.deliver(std::move(second)); }) == ErrorCode::kBusy);
  CHECK(kit.count(BlockState::kReserved) == 1);
  CHECK(kit.received.pop(0) != nullptr);
  kit.deliver(std::move(second));
  const auto item = kit.received.pop(0);
  REQUIRE(item != nullptr);
  CHECK(item->inserted);
  kit.pool->unpin(&item->pin, 1);
}

TEST_CASE("a delivery for pages that are being filled is refused, and nobody is told of it") {
  Kit kit;
  Delivery delivery = kit.delivery(2, /*insert=*/true);
  const Addresses blocks = delivery.reservation.addresses;
  const Addresses own = alloc(*kit.pool, 1);
  const Tokens tokens = prompt(1, 1);
  Addresses canonical(1);
  const InsertItem item{tokens.data(), tokens.size(), own.data(), 1, canonical.data()};
  const Pins pins(kit.pool, kit.pool->insert_unfilled("", item, false).pin);
  CHECK(code_of([&] { kit.blocks.deliver(std::move(delivery)); }) == ErrorCode::kBusy);
  CHECK(kit.received.pop(0) == nullptr);
  CHECK_NOTHROW(kit.blocks.check_reserved(blocks, kWriter));
  kit.blocks.release(delivery.reservation.addresses);
  CHECK(kit.count(BlockState::kFree) == 7);
  kit.pool->filled(own);
}

TEST_CASE("an item says who owns its blocks") {
  Kit kit;
  kit.deliver(kit.named(2, /*insert=*/false));
  const auto lent = kit.received.pop(0);
  CHECK((lent->lent && !lent->inserted));
  CHECK(kit.count(BlockState::kLent) == 2);
  kit.deliver(kit.named(1, /*insert=*/true));
  const auto inserted = kit.received.pop(0);
  CHECK((!inserted->lent && inserted->inserted));
  kit.pool->unpin(&inserted->pin, 1);
  kit.deliver(kit.delivery(1, /*insert=*/false));
  const auto own = kit.received.pop(0);
  CHECK((!own->lent && !own->inserted));
}

TEST_CASE("lent blocks whose insertion runs out of memory are lent to the same peer as before") {
  int attempts = 0;
  fail_each_allocation([&](auto&& fail) {
    ++attempts;
    Kit kit;
    Delivery delivery = kit.named(3, /*insert=*/true);
    const Addresses lent = delivery.reservation.addresses;
    if (!fail([&] { static_cast<void>(kit.blocks.deliver(std::move(delivery))); })) return;
    CHECK(kit.count(BlockState::kLent) == 3);
    for (const Address address : lent) {
      const BlockOwner owner = kit.pool->for_peers().owner_of(address);
      CHECK((owner.state == BlockState::kLent && owner.incarnation == kWriter.incarnation));
    }
    kit.deliver(std::move(delivery));
    CHECK(kit.count(BlockState::kHistorical) == 3);
    const auto item = kit.received.pop(0);
    kit.pool->unpin(&item->pin, 1);
  });
  CHECK(attempts > 3);
}

// The application knows where they are when an earlier transfer to them told it. Its free() used to succeed while they
// were between lent and cached: then they were lent again and free at once, and the pool's counts were wrong.
TEST_CASE("lent blocks on their way to the index cannot be freed by anyone who knows their addresses") {
  constexpr int kRounds = thread_length(50'000);
  constexpr Token kPrompts = 20'000;  // more than the pool holds
  Kit kit;
  std::atomic<Address> target{0};
  std::atomic<bool> stop{false};
  std::atomic<int> freed{0};
  std::atomic<int> refused{0};
  std::thread application([&] {
    while (!stop) {
      const Address address = target;
      if (address == 0) continue;
      try {
        kit.pool->free(&address, 1);
        ++freed;
      } catch (const Error&) {
        ++refused;
      }
    }
  });
  std::optional<ErrorCode> failure;
  for (int round = 0; round < kRounds && freed == 0 && !failure; ++round) {
    Delivery delivery = kit.named(1, /*insert=*/true, round % kPrompts);
    target = delivery.reservation.addresses[0];
    sleep_while([&] { return round == 0 && refused == 0; });
    failure = code_of([&] { kit.blocks.publish(std::move(kit.blocks.deliver(std::move(delivery)).news)); });
    if (const auto item = kit.received.pop(0); item != nullptr) kit.pool->unpin(&item->pin, 1);
  }
  stop = true;
  application.join();
  CHECK_FALSE(failure.has_value());
  CHECK(freed == 0);
  CHECK(kit.count(BlockState::kHistorical) == 8);
}

}  // namespace
}  // namespace kvpool::testing
