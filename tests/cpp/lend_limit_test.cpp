// How many blocks a pool lends, and lets its peers view.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "kvpool/pool/peer_claims.h"
#include "pool_fixture.h"
#include "remote_attend_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kOne = 7;  // borrowers
constexpr std::uint64_t kOther = 8;

std::int64_t field(const Error& error, std::string_view name) {
  const auto found = std::ranges::find(error.fields(), name, &ErrorField::first);
  return found == error.fields().end() ? -1 : found->second;
}

Addresses lend(Pool& pool, std::uint64_t to, std::size_t n, Medium medium = Medium::kHbm, bool evict = true) {
  Addresses out(n);
  REQUIRE(pool.for_peers().take(n, medium, BlockState::kLent, to, 0, evict, out.data()));
  return out;
}

TEST_CASE("a pool lends so many blocks of all media to all peers together, and refuses more") {
  PoolOptions options = small_options(8, 8);
  options.lend_max = 6;
  const auto pool = std::make_shared<Pool>(options);
  const Addresses first = lend(*pool, kOne, 3);
  const Addresses second = lend(*pool, kOther, 2, Medium::kDram);
  for (const bool evict : {false, true}) {
    CAPTURE(evict);
    const auto refused = error_of([&] { lend(*pool, kOther, 2, Medium::kHbm, evict); });
    REQUIRE(refused);
    CHECK(refused->code() == ErrorCode::kBusy);
    CHECK(field(*refused, "limit") == 6);
    CHECK(field(*refused, "free") == 1);
    CHECK(field(*refused, "requested") == 2);
  }
  const Addresses third = lend(*pool, kOther, 1);  // the sixth
  CHECK(code_of([&] { lend(*pool, kOne, 1); }) == ErrorCode::kBusy);
  const Addresses own = alloc(*pool, 4);  // what the application and transfers take is not limited
  Addresses reserved(1);
  CHECK(pool->for_peers().take(1, Medium::kDram, BlockState::kReserved, kOne, 1, false, reserved.data()));
  pool->for_peers().release(first.data(), 2);
  lend(*pool, kOne, 2);
  CHECK(code_of([&] { lend(*pool, kOne, 1); }) == ErrorCode::kBusy);
  pool->audit();
}

TEST_CASE("a lower limit leaves what is lent, and one of 0 lends nothing") {
  const auto pool = std::make_shared<Pool>(small_options(8, 0));
  CHECK(pool->for_peers().lend_max() == -1);
  const Addresses lent = lend(*pool, kOne, 5);
  pool->for_peers().set_lend_max(3);
  const auto refused = error_of([&] { lend(*pool, kOne, 1); });
  REQUIRE(refused);
  CHECK(field(*refused, "free") == 0);
  CHECK(pool->for_peers().owner_of(lent[4]).state == BlockState::kLent);
  pool->for_peers().release(lent.data(), 2);
  CHECK(code_of([&] { lend(*pool, kOne, 1); }) == ErrorCode::kBusy);
  pool->for_peers().release(&lent[2], 1);
  lend(*pool, kOne, 1);
  pool->for_peers().set_lend_max(0);
  pool->for_peers().release(&lent[3], 2);
  CHECK(code_of([&] { lend(*pool, kOne, 1); }) == ErrorCode::kBusy);
  pool->for_peers().set_lend_max(-1);
  lend(*pool, kOne, 4);
}

// What is refused has evicted nothing.
TEST_CASE("cached blocks stay when the limit, not the room, is what refuses a loan") {
  PoolOptions options = small_options(4, 0);
  options.lend_max = 2;
  const auto pool = std::make_shared<Pool>(options);
  const Addresses cached = alloc(*pool, 4);
  insert(pool, prompt(1, 4), cached);
  CHECK(code_of([&] { lend(*pool, kOne, 3); }) == ErrorCode::kBusy);
  CHECK(pool->stats().media[Medium::kHbm].by_state[static_cast<std::size_t>(BlockState::kHistorical)] == 4);
  lend(*pool, kOne, 2);
  CHECK(pool->stats().media[Medium::kHbm].by_state[static_cast<std::size_t>(BlockState::kHistorical)] == 2);
}

TEST_CASE("borrowers that ask at once never have more than the limit together") {
  PoolOptions options = small_options(64, 0);
  options.lend_max = 10;
  const auto pool = std::make_shared<Pool>(options);
  std::atomic<int> lent{0};
  std::atomic<int> most{0};
  std::atomic<int> served{0};
  std::vector<std::jthread> borrowers;
  for (std::uint64_t number = 1; number <= 3; ++number) {
    borrowers.emplace_back([&, number] {
      for (int round = 0; round < 300; ++round) {
        Addresses out(4);
        const auto refused = error_of(
            [&] { pool->for_peers().take(4, Medium::kHbm, BlockState::kLent, number, 0, round % 2 == 0, out.data()); });
        if (refused) continue;
        const int now = lent.fetch_add(4) + 4;
        for (int seen = most.load(); seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        ++served;
        lent.fetch_sub(4);
        pool->for_peers().release(out.data(), 4);
      }
    });
  }
  borrowers.clear();
  CHECK(served > 0);
  CHECK(most <= 10);
  CHECK(free_blocks(*pool) == 64);
}

TEST_CASE("a peer views so many blocks at most") {
  const AttendMember a("a");
  ServiceOptions options;
  options.name = "b";
  options.secret = "s3cret";
  options.viewed_max = 4;
  const auto node = make_attendable_node(16);
  Service& b = node->start_service(options);
  a.service->connect(b.listen(unix_address()), real_seconds(60));
  const Addresses lent = a.borrow("b", 6);
  const auto sequence = sequence_of(*a.node, {lent.begin(), lent.begin() + 3});
  const Addresses rest(lent.begin() + 3, lent.end());
  const auto refused = error_of([&] { sequence_of(*a.node, rest); });
  REQUIRE(refused);
  CHECK(refused->code() == ErrorCode::kBusy);
  CHECK(field(*refused, "limit") == 4);
  sequence->close();
  const auto other = sequence_of(*a.node, rest);
  other->close();
  a.service->free(lent.data(), lent.size(), soon());
  CHECK(comes_true([&] { return free_blocks(node->pool()) == 16; }));
}

}  // namespace
}  // namespace kvpool::testing
