// The generations of blocks in a store: where they start, how blocks retire after the last, and what an overlap keeps.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "block_store_kit.h"
#include "kvpool/blocks/block_store.h"

namespace {

using kvpool::Address;
using kvpool::AddressFault;
using kvpool::block_of;
using kvpool::BlockState;
using kvpool::BlockStore;
using kvpool::generation_of;
using kvpool::kBlocksMax;
using kvpool::kGenerationMax;
using kvpool::make_address;
using kvpool::Medium;
using kvpool::testing::block_store::take_blocks;

}  // namespace

TEST_CASE("an address from a store that starts at another generation is stale") {
  BlockStore early(Medium::kHbm, 4, 100);
  BlockStore late(Medium::kHbm, 4, kGenerationMax - 1);
  Address a = 0;
  Address b = 0;
  REQUIRE(early.take(1, BlockState::kActive, &a));
  REQUIRE(late.take(1, BlockState::kActive, &b));
  CHECK(generation_of(a) == 100);
  CHECK(early.address_of(0) == a);
  CHECK(early.find(b) == AddressFault::kStale);
  CHECK(late.find(a) == AddressFault::kStale);
  CHECK(late.find(b) == AddressFault::kNone);
  late.release(0, 1);
  REQUIRE(late.take_block(0, BlockState::kActive, &b));
  CHECK(generation_of(b) == kGenerationMax);
  late.release(0, 1);  // its last
  CHECK(late.count(BlockState::kRetired) == 1);
  CHECK(late.address_of(0) != b);
  late.audit();
}

TEST_CASE("a block whose generations are used up is retired and never comes back") {
  BlockStore store(Medium::kHbm, 8);
  store.set_generation_for_test(5, kGenerationMax);
  const std::vector<Address> all = take_blocks(store, 8);
  CHECK(generation_of(all[5]) == kGenerationMax);
  CHECK(block_of(all[5]) == 5);
  CHECK(store.find(all[5]) == AddressFault::kNone);
  store.release(0, 8);  // it is retired from the middle of a range
  CHECK(store.state(5) == BlockState::kRetired);
  CHECK(store.count(BlockState::kRetired) == 1);
  CHECK(store.free_count() == 7);
  CHECK(store.free_runs().runs == 2);
  CHECK(store.free_runs().longest == 5);
  CHECK(store.find(all[5]) == AddressFault::kStale);
  CHECK(store.find(store.address_of(5)) == AddressFault::kStale);
  for (const std::uint32_t generation : {0U, 1U, kGenerationMax}) {
    CHECK(store.find(make_address(0, Medium::kHbm, generation, 5)) == AddressFault::kStale);
  }
  Address out = 0;
  CHECK_FALSE(store.take_block(5, BlockState::kActive, &out));
  std::vector<Address> rest(8);
  CHECK_FALSE(store.take(8, BlockState::kActive, rest.data()));
  for (const Address address : take_blocks(store, 7)) CHECK(block_of(address) != 5);
  store.audit();
}

TEST_CASE("blocks retire at either end of a range, inside it, side by side, and all of it") {
  const std::vector<std::set<std::uint32_t>> cases = {{0}, {7}, {0, 7}, {3, 4}, {0, 1, 2, 3, 4, 5, 6, 7}, {1, 3, 5}};
  for (const std::set<std::uint32_t>& retiring : cases) {
    BlockStore store(Medium::kDram, 8);
    for (const std::uint32_t block : retiring) store.set_generation_for_test(block, kGenerationMax);
    take_blocks(store, 8);
    store.set_state(2, BlockState::kHistorical);
    store.set_state(4, BlockState::kLent);
    store.release(0, 8);
    CHECK(store.count(BlockState::kRetired) == retiring.size());
    CHECK(store.free_count() == 8 - retiring.size());
    for (std::uint32_t block = 0; block < 8; ++block) {
      CHECK((store.state(block) == BlockState::kRetired) == retiring.contains(block));
    }
    store.audit();
  }
}

TEST_CASE("a store retires its blocks after its last generation") {
  BlockStore store(Medium::kDram, 2, 5, 7);
  for (std::uint32_t generation = 5; generation <= 7; ++generation) {
    Address address = 0;
    REQUIRE(store.take_block(0, BlockState::kActive, &address));
    CHECK(address == make_address(0, Medium::kDram, generation, 0));
    CHECK(store.find(address) == AddressFault::kNone);
    store.release(0, 1);
    CHECK(store.find(address) == AddressFault::kStale);
  }
  CHECK(store.state(0) == BlockState::kRetired);
  CHECK(store.free_count() == 1);
  Address address = 0;
  CHECK_FALSE(store.take_block(0, BlockState::kActive, &address));
  store.audit();
}

TEST_CASE("blocks whose numbers the store is told have states and generations like others, and are retired in time") {
  BlockStore store(Medium::kHbm, 3, BlockStore::Placed{10}, 3, kGenerationMax);
  CHECK(store.capacity() == 3);
  CHECK(store.numbers() == 10);
  CHECK(store.free_count() == 3);
  std::vector<Address> out(3);
  store.place(1, 4, 2, BlockState::kActive, out.data());
  CHECK(out[0] == make_address(0, Medium::kHbm, 3, 1));
  CHECK(out[1] == make_address(0, Medium::kHbm, 3, 5));
  CHECK(store.count(BlockState::kActive) == 2);
  CHECK(store.free_count() == 1);
  CHECK(store.find(make_address(0, Medium::kHbm, 3, 10)) == AddressFault::kOutOfRange);
  store.audit();

  store.set_tag(1, 77);
  REQUIRE(store.unplace(1, 4, 1) == 1);
  CHECK(store.find(out[0]) == AddressFault::kStale);
  CHECK(store.free_count() == 2);
  CHECK(store.released() == 1);
  store.place(1, 4, 1, BlockState::kLent, out.data());
  CHECK(out[0] == make_address(0, Medium::kHbm, 4, 1));
  CHECK(store.tag(1) == 0);

  store.set_generation_for_test(9, kGenerationMax);
  store.place(9, 1, 1, BlockState::kActive, out.data());
  CHECK(store.unplace(9, 1, 1) == 0);
  CHECK(store.state(9) == BlockState::kRetired);
  CHECK(store.free_count() == 0);  // it counts as a block for ever
  store.audit();
}

TEST_CASE("a number has the slot of all numbers that are as near as no two blocks are") {
  std::mt19937 random(7);
  for (int i = 0; i < 200; ++i) {
    const std::uint32_t numbers = 1 + static_cast<std::uint32_t>(random()) % kBlocksMax;
    const std::uint32_t apart = 1 + static_cast<std::uint32_t>(random()) % (i % 2 == 0 ? 100 : numbers);
    CAPTURE(numbers);
    CAPTURE(apart);
    const BlockStore store(Medium::kHbm, 1, BlockStore::Placed{numbers, apart}, 1, kGenerationMax);
    CHECK(store.slots() == (numbers - 1) / apart + 1);
    for (int j = 0; j < 50; ++j) {
      const std::uint32_t number = static_cast<std::uint32_t>(random()) % numbers;
      const std::uint32_t multiple = number / apart * apart;
      REQUIRE(store.slot_of(number) == number / apart);
      REQUIRE(store.slot_of(multiple) == multiple / apart);
      if (multiple > 0) REQUIRE(store.slot_of(multiple - 1) == multiple / apart - 1);
    }
    REQUIRE(store.slot_of(numbers - 1) == (numbers - 1) / apart);
  }
}

TEST_CASE("blocks that follow each other in one slot have one generation after the other, and only the last is valid") {
  BlockStore store(Medium::kHbm, 3, BlockStore::Placed{13, 4}, 1, kGenerationMax);
  CHECK(store.metadata_bytes() == 4 * 20 + sizeof(BlockStore));
  std::vector<Address> out(3);
  store.place(1, 4, 3, BlockState::kActive, out.data());
  CHECK(out[2] == make_address(0, Medium::kHbm, 1, 9));
  const Address first = out[0];
  store.set_tag(5, 77);
  REQUIRE(store.unplace(1, 4, 1) == 1);
  store.place(3, 4, 1, BlockState::kLent, out.data());
  CHECK(out[0] == make_address(0, Medium::kHbm, 2, 3));
  CHECK(store.find(out[0]) == AddressFault::kNone);
  CHECK(store.find(first) == AddressFault::kStale);
  // As nobody was given them: the number of an earlier block with the generation of this one, and of none at all.
  CHECK(store.find(make_address(0, Medium::kHbm, 2, 1)) == AddressFault::kStale);
  CHECK(store.find(make_address(0, Medium::kHbm, 2, 2)) == AddressFault::kStale);
  CHECK(store.state(3) == BlockState::kLent);
  CHECK(store.tag(5) == 77);
  store.audit();
}

TEST_CASE("blocks are given back together up to the first one that is retired") {
  BlockStore store(Medium::kHbm, 6, BlockStore::Placed{16, 2}, 1, kGenerationMax);
  store.set_generation_for_test(6, kGenerationMax);
  std::vector<Address> out(6);
  store.place(0, 2, 6, BlockState::kActive, out.data());
  store.set_state(4, BlockState::kHistorical);
  CHECK(store.unplace(0, 2, 6) == 3);
  CHECK(store.state(6) == BlockState::kRetired);
  CHECK(store.state(8) == BlockState::kActive);
  CHECK(store.unplace(8, 2, 2) == 2);
  CHECK(store.count(BlockState::kRetired) == 1);
  CHECK(store.free_count() == 5);
  CHECK(store.released() == 6);
  store.audit();
}

TEST_CASE("an audit knows the generations that a store with units as numbers has given out") {
  BlockStore store(Medium::kHbm, 4, BlockStore::Placed{8, 2}, 5, 7);
  Address address = 0;
  for (std::uint32_t generation = 5; generation <= 7; ++generation) {
    store.place(2, 2, 1, BlockState::kActive, &address);
    CHECK(generation_of(address) == generation);
    CHECK(store.generation_after() == generation + 1);
    store.audit();
    CHECK(store.unplace(2, 2, 1) == (generation == 7 ? 0 : 1));
    store.audit();
  }
  CHECK(store.count(BlockState::kRetired) == 1);
}

TEST_CASE("all numbers have one slot when blocks are further apart than there are numbers") {
  for (const std::uint32_t apart : {kBlocksMax, 2 * kBlocksMax, UINT32_MAX}) {
    CAPTURE(apart);
    const BlockStore store(Medium::kHbm, 1, BlockStore::Placed{kBlocksMax, apart}, 1, kGenerationMax);
    CHECK(store.slots() == 1);
    for (const std::uint32_t block : {0U, 7U, kBlocksMax - 1}) CHECK(store.slot_of(block) == 0);
    store.audit();
  }
}

TEST_CASE("suspended blocks cannot be taken, come back with their generations, and leave retired ones retired") {
  BlockStore store(Medium::kHbm, 8, 3);
  store.set_generation_for_test(5, kGenerationMax);
  std::vector<Address> out = take_blocks(store, 8);
  store.release(0, 8);
  REQUIRE(store.state(5) == BlockState::kRetired);
  store.suspend();
  CHECK(store.count(BlockState::kSuspended) == 7);
  CHECK(store.free_count() == 0);
  CHECK(store.state(5) == BlockState::kRetired);
  CHECK_FALSE(store.take(1, BlockState::kActive, out.data()));
  CHECK_FALSE(store.take_block(0, BlockState::kActive, out.data()));
  CHECK(store.find(store.address_of(0)) == AddressFault::kNone);  // of the state nothing is said here
  store.audit();
  store.resume();
  CHECK(store.free_count() == 7);
  CHECK(store.free_runs().longest == 5);
  CHECK(store.count(BlockState::kRetired) == 1);
  REQUIRE(store.take_block(0, BlockState::kActive, out.data()));
  CHECK(generation_of(out[0]) == 4);
  store.audit();
}
